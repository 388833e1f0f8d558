"""The prompt topics of the routes as one consumer: named ones, and those that a pattern matches, new ones included."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import structlog

from topics.routes import RouteTable
from worker.broker.api import (
    PARTITION_ERRORS,
    Admin,
    BrokerError,
    Consumer,
    OffsetCommit,
    RebalanceListener,
    Record,
    TopicPartition,
)
from worker.errors import WorkerError
from worker.watchdog import Watchdog

REFRESH_SECONDS = 30.0
UNJOINED_SECONDS = 0.05

log = structlog.get_logger(__name__)


class UnequalPartitionsError(WorkerError):
    """The prompt topics have unequal partition counts, so that not every worker would hold every class."""


def check_partition_counts(counts: Mapping[str, int]) -> None:
    """Raises UnequalPartitionsError, which names the topics, unless all counts are equal."""
    if len(set(counts.values())) > 1:
        named = ", ".join(f"{topic} has {count}" for topic, count in sorted(counts.items()))
        raise UnequalPartitionsError(
            f"the prompt topics need equal partition counts, so that every worker holds every class: {named}"
        )


def _warn_of_fewer_partitions(topics: Collection[str], counts: Mapping[str, int]) -> None:
    most = max((counts[topic] for topic in topics if topic in counts), default=0)
    if fewer := {topic: counts[topic] for topic in sorted(topics) if counts.get(topic, most) < most}:
        log.warning("topics with fewer partitions than others: not every worker holds one", topics=fewer, others=most)


class Subscription:
    """A `Consumer` of all topics of a route table. Topics named in it must have equal partition counts at the start;
    where a route has a pattern, `run` looks for new topics and joins the group again with them. Those with fewer
    partitions than others are named by a warning: who may create a topic must not be able to stop the workers."""

    def __init__(
        self,
        join: Callable[[Sequence[str], RebalanceListener], Consumer],
        listener: RebalanceListener,
        routes: RouteTable,
        admin: Admin,
        *,
        watchdog: Watchdog,
        refresh_seconds: float = REFRESH_SECONDS,
    ) -> None:
        self._join = join
        self._listener = listener
        self._routes = routes
        self._admin = admin
        self._watchdog = watchdog
        self._refresh_seconds = refresh_seconds
        self._topics: frozenset[str] = frozenset()
        self._consumer: Consumer | None = None
        self._polling = asyncio.Lock()
        self._changing = asyncio.Lock()  # one change of consumers at a time; taken after the other one
        self._joined = asyncio.Event()
        self._left = False

    async def start(self) -> None:
        """Raises UnequalPartitionsError and BrokerError."""
        counts = await self._admin.partition_counts()
        check_partition_counts({topic: counts[topic] for topic in self._routes.topics if topic in counts})
        topics = self._matching(counts)
        _warn_of_fewer_partitions(topics, counts)
        await self._subscribe(topics)

    async def run(self) -> None:
        """Follow the patterns until cancelled; returns at once where there are none."""
        if all(route.pattern is None for route in self._routes.routes):
            return
        while True:
            await asyncio.sleep(self._refresh_seconds)
            with contextlib.suppress(BrokerError):
                await self.refresh()

    async def refresh(self) -> None:
        """Join the group again if topics came that a route matches. Raises BrokerError."""
        if self._left:
            return
        counts = await self._admin.partition_counts()
        topics = self._matching(counts)
        if topics <= self._topics:
            return
        _warn_of_fewer_partitions(topics, counts)
        async with self._polling, self._changing:
            log.info("new prompt topics", topics=sorted(topics - self._topics))
            before = self._consumer
            if before is not None and not self._left:
                await self._listener.on_revoked(before.assignment())
                await before.stop()
            await self._subscribe(topics)

    async def renew(self) -> None:
        """Leave the group and join it again with another consumer, also when a poll of the old one hangs."""
        async with self._changing:
            if self._left:
                return
            before = self._inner
            await self._listener.on_revoked(before.assignment())
            await self._subscribe(self._topics, instead_of=before)

    @property
    def joined(self) -> bool:
        """Whether the consumer has started; False also after a start that failed, until `renew` has helped."""
        return self._joined.is_set()

    async def hand_over(self) -> None:
        """Leave the group like one that lost all its partitions: what runs is leased to this worker."""
        self._left = True
        await self._listener.on_revoked(self._inner.assignment())
        await self._inner.stop()

    async def stop(self) -> None:
        if self._consumer is not None:
            await self._consumer.stop()

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset() if self._consumer is None else self._consumer.assignment()

    async def poll(self, tp: TopicPartition, max_records: int, timeout_seconds: float) -> Sequence[Record]:
        return await self._watched((tp,), lambda consumer: consumer.poll(tp, max_records, timeout_seconds))

    async def poll_any(self, tps: Collection[TopicPartition], timeout_seconds: float) -> Sequence[Record]:
        return await self._watched(tps, lambda consumer: consumer.poll_any(tps, timeout_seconds))

    async def _watched(
        self, tps: Collection[TopicPartition], poll: Callable[[Consumer], Awaitable[Sequence[Record]]]
    ) -> Sequence[Record]:
        async with self._polling:
            if not self._joined.is_set():
                await asyncio.sleep(UNJOINED_SECONDS)
                return ()
            records: Sequence[Record]
            consumer = self._inner
            self._watchdog.asked(tps)
            try:
                records = await poll(consumer)
            except BrokerError as error:
                if consumer is self._consumer:
                    if isinstance(error, PARTITION_ERRORS):  # an answer, as good as it gets
                        self._watchdog.answered(tps, fruitful=tps if len(tps) == 1 else ())
                    raise
                records = ()  # it was replaced under the poll
            self._watchdog.answered(tps, fruitful={record.tp for record in records})
            return records

    def pause(self, tps: Collection[TopicPartition]) -> None:
        self._inner.pause(tps)

    def resume(self, tps: Collection[TopicPartition]) -> None:
        self._inner.resume(tps)

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self._inner.seek(tp, offset)

    async def commit(self, offsets: Mapping[TopicPartition, OffsetCommit]) -> None:
        await self._inner.commit(offsets)

    async def committed(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, OffsetCommit | None]:
        return await self._inner.committed(tps)

    async def positions(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return await self._inner.positions(tps)

    async def end_offsets(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return await self._inner.end_offsets(tps)

    async def offsets_for_time(
        self, tps: Collection[TopicPartition], timestamp_ms: int
    ) -> dict[TopicPartition, int | None]:
        return await self._inner.offsets_for_time(tps, timestamp_ms)

    @property
    def _inner(self) -> Consumer:
        assert self._consumer is not None, "the consumer has not been started"
        return self._consumer

    def _matching(self, existing: Collection[str]) -> frozenset[str]:
        return self._routes.topics | {topic for topic in existing if self._routes.match(topic) is not None}

    async def _subscribe(self, topics: frozenset[str], *, instead_of: Consumer | None = None) -> None:
        """Join with a new consumer, unless we have left the group: one that has joined by then leaves again."""
        if self._left:
            return
        self._joined.clear()
        consumer = self._consumer = self._join(sorted(topics), self._listener)  # before it starts: the listener uses it
        if instead_of is not None:
            await instead_of.stop()  # ends a poll that hangs
        if self._left:
            return
        await consumer.start()
        if self._left:
            await consumer.stop()
            return
        self._topics = topics  # not before: after a start that failed the next refresh tries again
        self._joined.set()
