"""A member of a Kafka consumer group."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aiokafka import ConsumerRebalanceListener, errors
from aiokafka import TopicPartition as KafkaTopicPartition

from worker.broker.api import CommitRejectedError, OffsetCommit, RebalanceListener, Record, TopicPartition
from worker.broker.kafka_admin import KafkaAdmin
from worker.broker.kafka_connection import KafkaConnection, retrying
from worker.broker.kafka_fetcher import KafkaFetcher


class KafkaConsumer(ConsumerRebalanceListener):  # type: ignore[misc]
    """See `worker.broker.api.Consumer`. Pauses of partitions we keep outlive a rebalance."""

    def __init__(
        self, connection: KafkaConnection, group: str, topics: Sequence[str], listener: RebalanceListener
    ) -> None:
        self._connection = connection
        self._group = group
        self._topics = tuple(topics)
        self._listener = listener
        self._fetcher = KafkaFetcher(connection, group)
        self._admin = KafkaAdmin(connection)
        self._paused: set[TopicPartition] = set()

    async def start(self) -> None:
        await self._admin.start()
        await self._fetcher.start(self._topics, self)

    async def stop(self) -> None:
        await self._fetcher.stop()
        await self._admin.stop()

    async def on_partitions_revoked(self, revoked: Collection[Any]) -> None:
        if revoked:
            await self._listener.on_revoked(frozenset(TopicPartition(*tp) for tp in revoked))

    async def on_partitions_assigned(self, assigned: Collection[Any]) -> None:
        ours = frozenset(TopicPartition(*tp) for tp in assigned)
        self._paused &= ours
        self.pause(self._paused)  # before anything is awaited: records flow during this callback
        self._fetcher.forget_positions()
        await self._listener.on_assigned(ours)

    def assignment(self) -> frozenset[TopicPartition]:
        return self._fetcher.assignment()

    async def poll(self, tp: TopicPartition, max_records: int, timeout_seconds: float) -> Sequence[Record]:
        return await self._fetcher.fetch(tp, max_records, timeout_seconds)

    async def poll_any(self, tps: Collection[TopicPartition], timeout_seconds: float) -> Sequence[Record]:
        return await self._fetcher.fetch_any(tps, timeout_seconds)

    def pause(self, tps: Collection[TopicPartition]) -> None:
        ours = self.assignment() & set(tps)
        self._paused |= ours
        if ours:
            self._fetcher.client.pause(*self._fetcher.foreign(ours))

    def resume(self, tps: Collection[TopicPartition]) -> None:
        self._paused.difference_update(tps)
        if ours := self.assignment() & set(tps):
            self._fetcher.client.resume(*self._fetcher.foreign(ours))

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self._fetcher.seek(tp, offset)

    async def commit(self, offsets: Mapping[TopicPartition, OffsetCommit]) -> None:
        if lost := offsets.keys() - self.assignment():
            raise CommitRejectedError(f"not assigned: {sorted(lost)}")

        async def attempt() -> None:
            full = {KafkaTopicPartition(*tp): (commit.offset, commit.metadata) for tp, commit in offsets.items()}
            try:
                await self._fetcher.client.commit(full)
            except errors.OffsetMetadataTooLargeError:
                await self._fetcher.client.commit({tp: (offset, "") for tp, (offset, _) in full.items()})

        timeout = self._connection.request_timeout_seconds
        await retrying(attempt, timeout, timeout)

    async def committed(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, OffsetCommit | None]:
        return await self._admin.committed(self._group, tps)

    async def positions(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: await self._fetcher.position(tp) for tp in self.assignment().intersection(tps)}

    async def end_offsets(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return await self._fetcher.ends(tps)

    async def offsets_for_time(
        self, tps: Collection[TopicPartition], timestamp_ms: int
    ) -> dict[TopicPartition, int | None]:
        return await self._fetcher.at_time(tps, timestamp_ms)
