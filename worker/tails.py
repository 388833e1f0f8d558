"""Whether the end of a partition is a gap: offsets without records, as compaction and control records leave them."""

from collections.abc import Mapping
from contextlib import aclosing

from worker.broker.api import Broker, TopicPartition
from worker.scan import scan


async def empty_tails(broker: Broker, positions: Mapping[TopicPartition, int]) -> frozenset[TopicPartition]:
    """The partitions that hold no record at or after their position. Reads their whole topics, so ask only when
    polling has brought nothing for a while. Raises BrokerError."""
    last: dict[TopicPartition, int] = {}
    async with aclosing(scan(broker, {tp.topic for tp in positions})) as records:
        async for record in records:
            last[record.tp] = record.offset
    return frozenset(tp for tp, position in positions.items() if last.get(tp, -1) < position)
