"""The state of the in-memory broker: logs, committed offsets, groups, injected faults. It knows no client interface."""

import asyncio
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from worker.broker.api import NewTopic, OffsetCommit, RebalanceListener, Record, TopicNotAvailableError, TopicPartition

logger = logging.getLogger(__name__)

OPERATIONS = frozenset({"start", "stop", "poll", "commit", "committed", "offsets", "send", "ack", "admin"})


class Changes:
    """Wakes everybody who waits for the cluster to change; never sleeps."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait_for(self, predicate: Callable[[], bool], timeout_seconds: float | None = None) -> bool:
        """Whether `predicate` came true in time; it is asked at once and after every change."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while not predicate():
                    await self._event.wait()
        except TimeoutError:
            return predicate()
        return True


class Faults:
    """Errors and stalls that a test asks for, by operation (see `OPERATIONS`), `send` and `ack` also by topic."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._errors: dict[tuple[str, str | None], deque[Exception]] = {}
        self._stalled: set[tuple[str, str | None]] = set()

    def fail_next(self, operation: str, error: Exception, times: int = 1, topic: str | None = None) -> None:
        if operation not in OPERATIONS:
            raise KeyError(operation)
        self._errors.setdefault((operation, topic), deque()).extend([error] * times)

    def stall(self, operation: str, topic: str | None = None) -> None:
        if operation not in OPERATIONS:
            raise KeyError(operation)
        self._stalled.add((operation, topic))

    def unstall(self) -> None:
        self._stalled.clear()
        self._changes.notify()

    def stalled(self, operation: str, topic: str | None = None) -> bool:
        return (operation, None) in self._stalled or (operation, topic) in self._stalled

    def raise_if_failing(self, operation: str, topic: str | None = None) -> None:
        for key in ((operation, topic), (operation, None)):
            if errors := self._errors.get(key):
                raise errors.popleft()

    async def pass_through(self, operation: str, topic: str | None = None) -> None:
        """Wait while `operation` is stalled, then raise the error queued for it, if any."""
        await self._changes.wait_for(lambda: not self.stalled(operation, topic))
        self.raise_if_failing(operation, topic)


@dataclass(slots=True)
class PartitionLog:
    """Records in offset order; offsets may have gaps."""

    records: list[Record] = field(default_factory=list)
    next_offset: int = 0

    def append(self, record: Record) -> None:
        self.records.append(record)
        self.next_offset = record.offset + 1

    def read(self, offset: int, max_records: int) -> list[Record]:
        start = bisect_left(self.records, offset, key=lambda record: record.offset)
        return self.records[start : start + max_records]

    def offset_at(self, timestamp_ms: int) -> int | None:
        return next((record.offset for record in self.records if record.timestamp_ms >= timestamp_ms), None)


@dataclass(frozen=True, slots=True)
class Topic:
    partitions: tuple[PartitionLog, ...]
    config: Mapping[str, str]


class Member(Protocol):
    """What a group needs of a consumer; `assign` goes back to committed positions, as an eager rebalance does."""

    topics: tuple[str, ...]
    listener: RebalanceListener

    def assignment(self) -> frozenset[TopicPartition]: ...

    def assign(self, tps: Collection[TopicPartition]) -> None: ...


class Group:
    """Members and committed offsets of one consumer group; rebalances eagerly, one at a time."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.offsets: dict[TopicPartition, OffsetCommit] = {}
        self._rebalancing = asyncio.Lock()

    async def rebalance(
        self, topics: Mapping[str, Topic], *, joins: Member | None = None, leaves: Member | None = None
    ) -> None:
        """Revoke everything from everybody, then assign ranges topic by topic in the order of joining."""
        async with self._rebalancing:
            if leaves is not None and leaves in self.members:
                self.members.remove(leaves)
                leaves.assign(())
            for member in self.members:
                if revoked := member.assignment():
                    await self._call(member.listener.on_revoked, revoked)
            if joins is not None:
                self.members.append(joins)
            for member in self.members:
                member.assign(())
            shares = self._ranges(topics)
            for member, share in zip(self.members, shares, strict=True):
                member.assign(share)
            for member, share in zip(self.members, shares, strict=True):
                await self._call(member.listener.on_assigned, frozenset(share))

    def _ranges(self, topics: Mapping[str, Topic]) -> list[list[TopicPartition]]:
        shares: list[list[TopicPartition]] = [[] for _ in self.members]
        for name, topic in sorted(topics.items()):
            takers = [share for member, share in zip(self.members, shares, strict=True) if name in member.topics]
            if not takers:
                continue
            each, extra = divmod(len(topic.partitions), len(takers))
            start = 0
            for i, share in enumerate(takers):
                end = start + each + (i < extra)
                share.extend(TopicPartition(name, partition) for partition in range(start, end))
                start = end
        return shares

    @staticmethod
    async def _call(
        callback: Callable[[Collection[TopicPartition]], Awaitable[None]], tps: Collection[TopicPartition]
    ) -> None:
        try:
            await callback(tps)
        except Exception:  # whatever a listener raises: Kafka's client logs it and goes on too
            logger.exception("a rebalance callback failed")


class MemoryCluster:
    """Everything the clients of one in-memory broker share."""

    def __init__(self, max_message_bytes: int, now_ms: Callable[[], int]) -> None:
        self.cluster_id = "memory"
        self.changes = Changes()
        self.faults = Faults(self.changes)
        self.max_message_bytes = max_message_bytes
        self.now_ms = now_ms
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, Group] = {}

    def group(self, name: str) -> Group:
        return self.groups.setdefault(name, Group())

    def log(self, tp: TopicPartition) -> PartitionLog:
        """Raises TopicNotAvailableError."""
        topic = self.topics.get(tp.topic)
        if topic is None or not 0 <= tp.partition < len(topic.partitions):
            raise TopicNotAvailableError(f"there is no {tp.topic}[{tp.partition}]")
        return topic.partitions[tp.partition]

    async def create(self, topic: NewTopic) -> bool:
        if topic.name in self.topics:
            return False
        logs = tuple(PartitionLog() for _ in range(topic.num_partitions))
        self.topics[topic.name] = Topic(logs, dict(topic.config or {}))
        await self._rebalance_readers_of(topic.name)
        return True

    async def delete(self, name: str) -> None:
        if self.topics.pop(name, None) is None:
            return
        for group in self.groups.values():
            group.offsets = {tp: commit for tp, commit in group.offsets.items() if tp.topic != name}
        await self._rebalance_readers_of(name)

    async def _rebalance_readers_of(self, name: str) -> None:
        for group in list(self.groups.values()):
            if any(name in member.topics for member in group.members):
                await group.rebalance(self.topics)
        self.changes.notify()
