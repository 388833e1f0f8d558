"""A broker inside the process, for tests and for use without Kafka. Same contract as `kafka`, plus faults on demand.

Nothing is written to disk and nothing waits on a clock but the timeouts that callers give.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count

from worker.broker.api import (
    BrokerUnavailableError,
    Headers,
    MessageTooLargeError,
    NewTopic,
    OffsetCommit,
    ProducerWedgedError,
    RebalanceListener,
    Record,
    TopicNotAvailableError,
    TopicPartition,
)
from worker.broker.memory_cluster import MemoryCluster
from worker.broker.memory_consumer import MemoryConsumer
from worker.broker.partitioner import partition_for

_RECORD_OVERHEAD_BYTES = 70  # batch and record framing of Kafka's format v2, rounded up


class MemoryReader:
    """See `worker.broker.api.Reader`."""

    def __init__(self, cluster: MemoryCluster, topics: Sequence[str], *, from_beginning: bool) -> None:
        self._cluster = cluster
        self._topics = tuple(topics)
        self._from_beginning = from_beginning
        self._positions: dict[TopicPartition, int] = {}

    async def start(self) -> None:
        await self._cluster.faults.pass_through("start")
        for name in self._topics:
            if name not in self._cluster.topics:
                raise TopicNotAvailableError(f"there is no topic {name}")
            for partition, log in enumerate(self._cluster.topics[name].partitions):
                self._positions[TopicPartition(name, partition)] = 0 if self._from_beginning else log.next_offset

    async def stop(self) -> None:
        self._positions.clear()
        self._cluster.changes.notify()

    async def poll(self, max_records: int, timeout_seconds: float) -> Sequence[Record]:
        self._cluster.faults.raise_if_failing("poll")
        await self._cluster.changes.wait_for(lambda: bool(self._available(1)), timeout_seconds)
        records = self._available(max_records)
        for record in records:
            self._positions[record.tp] = record.offset + 1
        return records

    def _available(self, max_records: int) -> list[Record]:
        records: list[Record] = []
        if self._cluster.faults.stalled("poll"):
            return records
        for tp, position in self._positions.items():
            if tp.topic in self._cluster.topics:
                records += self._cluster.log(tp).read(position, max_records - len(records))
        return records

    async def at_end(self) -> bool:
        return not any(self._cluster.log(tp).read(position, 1) for tp, position in self._positions.items())


class MemoryProducer:
    """See `worker.broker.api.Producer`. Once an injected ProducerWedgedError was raised, every later send raises it."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster
        self._running = False
        self._wedged = False
        self._round_robin = count()

    async def start(self) -> None:
        await self._cluster.faults.pass_through("start")
        self._running = True

    async def stop(self) -> None:
        self._running = False

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> TopicPartition:
        if self._wedged:
            raise ProducerWedgedError("this producer can never send again")
        if not self._running:
            raise BrokerUnavailableError("the producer is not running")
        try:
            await self._cluster.faults.pass_through("send", topic)
            tp = self._append(topic, value, key, headers, partition)
            await self._cluster.faults.pass_through("ack", topic)
        except ProducerWedgedError:
            self._wedged = True
            raise
        return tp

    def _append(
        self, topic: str, value: bytes | None, key: bytes | None, headers: Headers, partition: int | None
    ) -> TopicPartition:
        target = self._cluster.topics.get(topic)
        if target is None:
            raise TopicNotAvailableError(f"there is no topic {topic}")
        num_partitions = len(target.partitions)
        if partition is None:
            partition = next(self._round_robin) % num_partitions if key is None else partition_for(key, num_partitions)
        tp = TopicPartition(topic, partition)
        log = self._cluster.log(tp)
        size = len(value or b"") + len(key or b"") + sum(len(n.encode()) + len(v or b"") for n, v in headers)
        limit = int(target.config.get("max.message.bytes", self._cluster.max_message_bytes))
        if size + _RECORD_OVERHEAD_BYTES > limit:
            raise MessageTooLargeError(f"{size} bytes for {topic}, which accepts {limit}")
        append_time = target.config.get("message.timestamp.type") == "LogAppendTime"
        log.append(
            Record(topic, partition, log.next_offset, self._cluster.now_ms(), key, value, tuple(headers), append_time)
        )
        self._cluster.changes.notify()
        return tp


class MemoryAdmin:
    """See `worker.broker.api.Admin`."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster

    async def start(self) -> None:
        await self._cluster.faults.pass_through("start")

    async def stop(self) -> None:
        pass

    async def create_topics(self, topics: Sequence[NewTopic]) -> list[str]:
        await self._cluster.faults.pass_through("admin")
        return [topic.name for topic in topics if await self._cluster.create(topic)]

    async def delete_topics(self, names: Collection[str]) -> None:
        await self._cluster.faults.pass_through("admin")
        for name in names:
            await self._cluster.delete(name)

    async def partition_counts(self, names: Collection[str] | None = None) -> dict[str, int]:
        await self._cluster.faults.pass_through("admin")
        topics = self._cluster.topics
        return {name: len(topics[name].partitions) for name in (topics if names is None else names) if name in topics}

    async def topic_configs(self, names: Collection[str]) -> dict[str, Mapping[str, str]]:
        await self._cluster.faults.pass_through("admin")
        return {name: self._cluster.topics[name].config for name in names if name in self._cluster.topics}

    async def committed(self, group: str, tps: Collection[TopicPartition]) -> dict[TopicPartition, OffsetCommit | None]:
        await self._cluster.faults.pass_through("admin")
        return {tp: self._cluster.group(group).offsets.get(tp) for tp in tps}

    async def cluster_id(self) -> str:
        return self._cluster.cluster_id


class MemoryBroker:
    """One cluster in memory. Topics exist only when created; `now_ms` stamps records."""

    def __init__(self, *, max_message_bytes: int = 1_048_588, now_ms: Callable[[], int] | None = None) -> None:
        self._cluster = MemoryCluster(max_message_bytes, now_ms or (lambda: time.time_ns() // 1_000_000))

    def consumer(self, group: str, topics: Sequence[str], listener: RebalanceListener) -> MemoryConsumer:
        return MemoryConsumer(self._cluster, group, topics, listener)

    def reader(self, topics: Sequence[str], *, from_beginning: bool) -> MemoryReader:
        return MemoryReader(self._cluster, topics, from_beginning=from_beginning)

    def producer(self) -> MemoryProducer:
        return MemoryProducer(self._cluster)

    def admin(self) -> MemoryAdmin:
        return MemoryAdmin(self._cluster)

    async def create_topics(self, *topics: NewTopic) -> list[str]:
        return await self.admin().create_topics(topics)

    def records(self, topic: str) -> list[Record]:
        """Everything `topic` holds now, partition by partition."""
        return [record for log in self._cluster.topics[topic].partitions for record in log.records]

    def leave_gap(self, tp: TopicPartition, num_offsets: int) -> None:
        """Use up offsets without records, as compaction and transaction markers do."""
        self._cluster.log(tp).next_offset += num_offsets

    def fail_next(self, operation: str, error: Exception, times: int = 1, *, topic: str | None = None) -> None:
        """Let the next `times` calls raise. `send` fails before the append, `ack` after it, with `topic` only for it;
        the others are named in `memory_cluster.OPERATIONS`."""
        self._cluster.faults.fail_next(operation, error, times, topic)

    def stall(self, operation: str, *, topic: str | None = None) -> None:
        """Let `operation` hang (polls time out) until `unstall`; with `topic` only sends to it."""
        self._cluster.faults.stall(operation, topic)

    def unstall(self) -> None:
        self._cluster.faults.unstall()
