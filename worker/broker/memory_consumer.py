"""A member of a consumer group of the in-memory broker."""

from collections.abc import Collection, Mapping, Sequence

from worker.broker.api import (
    CommitRejectedError,
    OffsetCommit,
    RebalanceListener,
    Record,
    TopicPartition,
)
from worker.broker.memory_cluster import MemoryCluster


class MemoryConsumer:
    """See `worker.broker.api.Consumer`. Positions start at the committed offset, else at the beginning."""

    def __init__(self, cluster: MemoryCluster, group: str, topics: Sequence[str], listener: RebalanceListener) -> None:
        self.topics = tuple(topics)
        self.listener = listener
        self._cluster = cluster
        self._group = cluster.group(group)
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._running = False

    async def start(self) -> None:
        await self._cluster.faults.pass_through("start")
        self._running = True
        await self._group.rebalance(self._cluster.topics, joins=self)

    async def stop(self) -> None:
        if self._running:
            self._running = False
            await self._group.rebalance(self._cluster.topics, leaves=self)
            self._cluster.faults.raise_if_failing("stop")

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._positions)

    def assign(self, tps: Collection[TopicPartition]) -> None:
        start = OffsetCommit(0)
        self._positions = {tp: self._group.offsets.get(tp, start).offset for tp in tps}
        self._paused.intersection_update(tps)
        self._cluster.changes.notify()

    async def poll(self, tp: TopicPartition, max_records: int, timeout_seconds: float) -> Sequence[Record]:
        self._cluster.faults.raise_if_failing("poll")
        await self._cluster.changes.wait_for(
            lambda: tp not in self._positions or bool(self._available(tp, 1)), timeout_seconds
        )
        records = self._available(tp, max_records)
        if records:
            self._positions[tp] = records[-1].offset + 1
        return records

    async def poll_any(self, tps: Collection[TopicPartition], timeout_seconds: float) -> Sequence[Record]:
        await self._cluster.changes.wait_for(
            lambda: not self._positions.keys() & set(tps) or any(self._available(tp, 1) for tp in tps), timeout_seconds
        )
        for tp in tps:
            if records := await self.poll(tp, 1, 0):
                return records
        return []

    def _available(self, tp: TopicPartition, max_records: int) -> list[Record]:
        position = self._positions.get(tp)
        if position is None or tp in self._paused or self._cluster.faults.stalled("poll"):
            return []
        return self._cluster.log(tp).read(position, max_records)

    def pause(self, tps: Collection[TopicPartition]) -> None:
        self._paused.update(self._positions.keys() & set(tps))

    def resume(self, tps: Collection[TopicPartition]) -> None:
        self._paused.difference_update(tps)
        self._cluster.changes.notify()

    def seek(self, tp: TopicPartition, offset: int) -> None:
        if tp in self._positions:
            self._positions[tp] = offset
            self._cluster.changes.notify()

    async def commit(self, offsets: Mapping[TopicPartition, OffsetCommit]) -> None:
        await self._cluster.faults.pass_through("commit")
        if lost := offsets.keys() - self._positions.keys():
            raise CommitRejectedError(f"not assigned: {sorted(lost)}")
        self._group.offsets.update(offsets)
        self._cluster.changes.notify()

    async def committed(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, OffsetCommit | None]:
        await self._cluster.faults.pass_through("committed")
        return {tp: self._group.offsets.get(tp) for tp in tps}

    async def positions(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        logs = {tp: self._cluster.log(tp) for tp in tps if tp in self._positions}
        return {
            tp: self._positions[tp] if log.read(self._positions[tp], 1) else log.next_offset for tp, log in logs.items()
        }

    async def end_offsets(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        await self._cluster.faults.pass_through("offsets")
        return {tp: self._cluster.log(tp).next_offset for tp in tps}

    async def offsets_for_time(
        self, tps: Collection[TopicPartition], timestamp_ms: int
    ) -> dict[TopicPartition, int | None]:
        await self._cluster.faults.pass_through("offsets")
        return {tp: self._cluster.log(tp).offset_at(timestamp_ms) for tp in tps}
