"""How far behind each partition is: what waits, for how long, and when the broker will drop it unanswered."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import structlog

from worker.assignment import Assignment
from worker.broker.api import Admin, BrokerError, Consumer, Record, TopicPartition
from worker.clock import Clock
from worker.metrics import Metrics
from worker.offsets import OffsetTracker
from worker.partition_backlog import PartitionBacklog

BYTES_PER_TOKEN = 4
MEASURE_SECONDS = 10.0
RETENTION_KNOWN_SECONDS = 300.0
MEAN_WEIGHT = 0.05
RETENTION = "retention.ms"
FOREVER = "-1"

log = structlog.get_logger(__name__)


def estimated_tokens(record: Record) -> int:
    """Of a prompt, from its bytes alone."""
    return len(record.value or b"") // BYTES_PER_TOKEN + 1


class _Polled(NamedTuple):
    offset: int
    timestamp_ms: int
    tokens: int


class Backlog:
    """Remembers of each polled prompt when it was written and how large it was, until it is answered."""

    def __init__(self, tracker: OffsetTracker) -> None:
        self._tracker = tracker
        self._polled: dict[TopicPartition, deque[_Polled]] = {}
        self._last_ms: dict[TopicPartition, int] = {}
        self._mean_tokens = 1.0

    def polled(self, tp: TopicPartition, records: Sequence[Record]) -> None:
        """New records of one partition, in their order."""
        queue = self._polled.setdefault(tp, deque())
        for record in records:
            tokens = estimated_tokens(record)
            self._mean_tokens += MEAN_WEIGHT * (tokens - self._mean_tokens)
            queue.append(_Polled(record.offset, record.timestamp_ms, tokens))
            self._last_ms[tp] = record.timestamp_ms
        self._forget(tp)

    def measure(
        self,
        positions: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        retention_ms: Mapping[str, int],
        now_ms: int,
    ) -> list[PartitionBacklog]:
        """`positions` of the partitions that are ours now; topics without retention are absent from `retention_ms`.

        Of what was never polled the age is unknown: it is taken to be that of the youngest record that was."""
        for gone in self._polled.keys() - positions.keys():
            del self._polled[gone]
            self._last_ms.pop(gone, None)
        return [
            self._measured(tp, max(0, ends[tp] - position), retention_ms.get(tp.topic), now_ms)
            for tp, position in sorted(positions.items())
            if tp in ends
        ]

    def _measured(
        self, tp: TopicPartition, num_unpolled: int, retention_ms: int | None, now_ms: int
    ) -> PartitionBacklog:
        self._forget(tp)
        unfinished = [one for one in self._polled.get(tp, ()) if self._tracker.is_unfinished(tp, one.offset)]
        written = [one.timestamp_ms for one in unfinished]
        if num_unpolled and tp in self._last_ms:
            written.append(self._last_ms[tp])
        oldest_ms = min(written, default=now_ms)
        tokens = sum(one.tokens for one in unfinished) + round(num_unpolled * self._mean_tokens)
        loss = (oldest_ms + retention_ms - now_ms) / 1000 if retention_ms is not None and tokens else None
        return PartitionBacklog(tp, max(0, now_ms - oldest_ms) / 1000, tokens, loss)

    def _forget(self, tp: TopicPartition) -> None:
        queue = self._polled.get(tp)
        while queue and not self._tracker.is_unfinished(tp, queue[0].offset):
            queue.popleft()


class BacklogWatch:
    """Measures now and then, for the metrics. What the broker does not say in time is left as it was."""

    def __init__(
        self,
        backlog: Backlog,
        assignment: Assignment,
        consumer: Consumer,
        admin: Admin,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._backlog = backlog
        self._assignment = assignment
        self._consumer = consumer
        self._admin = admin
        self._clock = clock
        self._metrics = metrics
        self._retention: Mapping[str, int] = {}
        self._asked_at: float | None = None
        self._known: frozenset[str] = frozenset()

    async def run(self, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Until cancelled."""
        await self._assignment.known.wait()
        while True:
            try:
                await self.look()
            except BrokerError as error:
                log.info("the backlog could not be measured", error=str(error))
            await sleep(MEASURE_SECONDS)

    async def look(self) -> None:
        """Measure once. Raises BrokerError."""
        ours = {tp: self._assignment.positions[tp] for tp in self._assignment.open}
        ends = await self._consumer.end_offsets(ours.keys()) if ours else {}
        retention = await self._retention_ms(frozenset(tp.topic for tp in ours))
        self._metrics.observe_backlog(self._backlog.measure(ours, ends, retention, self._clock.wall_ms()))

    async def _retention_ms(self, topics: frozenset[str]) -> Mapping[str, int]:
        """By topic, where it is bounded and we may know it; asked for again every few minutes."""
        now = self._clock.now()
        if self._asked_at is None or now - self._asked_at >= RETENTION_KNOWN_SECONDS or not topics <= self._known:
            self._asked_at, self._known = now, topics
            configs = await self._admin.topic_configs(topics)
            found = {topic: config.get(RETENTION, FOREVER) for topic, config in configs.items()}
            self._retention = {topic: int(text) for topic, text in found.items() if text != FOREVER}
        return self._retention
