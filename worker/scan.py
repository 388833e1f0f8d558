"""Whole topics, read once or followed."""

from collections.abc import AsyncGenerator, Collection

from worker.broker.api import Broker, Record

POLL_RECORDS = 500
POLL_SECONDS = 0.5


def scan(broker: Broker, topics: Collection[str]) -> AsyncGenerator[Record]:
    """All records that are there at the start, partition by partition. Raises BrokerError."""
    return follow(broker, topics, from_beginning=True, until_end=True)


async def follow(
    broker: Broker, topics: Collection[str], *, from_beginning: bool, until_end: bool
) -> AsyncGenerator[Record]:
    """Records as they come, partition by partition where there are many. Raises BrokerError."""
    if not topics:
        return
    reader = broker.reader(sorted(topics), from_beginning=from_beginning)
    try:
        await reader.start()
        while not (until_end and await reader.at_end()):
            for record in await reader.poll(POLL_RECORDS, POLL_SECONDS):
                yield record
    finally:
        await reader.stop()
