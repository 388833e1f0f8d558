"""Whether the end of a partition is a gap: offsets without records, as compaction and control records leave them."""

from collections.abc import Mapping

from worker.broker.api import Broker, TopicPartition

POLL_RECORDS = 500
POLL_SECONDS = 0.2


async def empty_tails(broker: Broker, positions: Mapping[TopicPartition, int]) -> frozenset[TopicPartition]:
    """The partitions that hold no record at or after their position. Reads their whole topics, so ask only when
    polling has brought nothing for a while. Raises BrokerError."""
    reader = broker.reader(sorted({tp.topic for tp in positions}), from_beginning=True)
    last: dict[TopicPartition, int] = {}
    try:
        await reader.start()
        while not await reader.at_end():
            for record in await reader.poll(POLL_RECORDS, POLL_SECONDS):
                last[record.tp] = record.offset
    finally:
        await reader.stop()
    return frozenset(tp for tp, position in positions.items() if last.get(tp, -1) < position)
