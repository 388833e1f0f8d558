"""Everything that whole topics hold now, read once."""

from collections.abc import AsyncGenerator, Collection

from worker.broker.api import Broker, Record

POLL_RECORDS = 500
POLL_SECONDS = 0.5


async def scan(broker: Broker, topics: Collection[str]) -> AsyncGenerator[Record]:
    """All records that are there at the start, partition by partition. Raises BrokerError."""
    reader = broker.reader(sorted(topics), from_beginning=True)
    try:
        await reader.start()
        while not await reader.at_end():
            for record in await reader.poll(POLL_RECORDS, POLL_SECONDS):
                yield record
    finally:
        await reader.stop()
