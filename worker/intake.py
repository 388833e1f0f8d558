"""The one poller: takes records of one partition at a time and hands each on once. Only it calls `Consumer.poll`."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from engine.api import EngineStats, PriorityClass
from worker.admission import Admission, Held, Start
from worker.assignment import Assignment
from worker.backlog import Backlog, estimated_tokens
from worker.backpressure import Backpressure
from worker.broker.api import PARTITION_ERRORS, BrokerError, Consumer, Record, TopicPartition
from worker.clock import Clock
from worker.committer import Committer
from worker.fair_queue import FairQueue
from worker.metrics import Metrics
from worker.offsets import OffsetTracker

MAX_RECORDS_PER_POLL = 8
IDLE_SECONDS = 0.05
GAP_SECONDS = 2.0
AGAIN_SECONDS = 5.0

log = structlog.get_logger(__name__)

SLOT_SHARE: Mapping[PriorityClass, float] = {
    PriorityClass.URGENT: 1.0,
    PriorityClass.STANDARD: 0.9,
    PriorityClass.BULK: 0.75,
}
"""How much of the in-flight limit all requests together may use before a class has to wait: urgent finds a slot."""


class Intake:
    """Polls while the limits allow: slots, the window of each partition, KV utilisation."""

    def __init__(
        self,
        consumer: Consumer,
        assignment: Assignment,
        tracker: OffsetTracker,
        admission: Admission,
        backlog: Backlog,
        *,
        queue: FairQueue,
        backpressure: Backpressure,
        stats: Callable[[], EngineStats],
        class_of: Callable[[str], PriorityClass],
        committer: Committer,
        max_inflight_requests: int,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._consumer = consumer
        self._assignment = assignment
        self._tracker = tracker
        self._admission = admission
        self._backlog = backlog
        self._committer = committer
        self._queue = queue
        self._backpressure = backpressure
        self._stats = stats
        self._class_of = class_of
        self._slots = {cls: math.ceil(max_inflight_requests * share) for cls, share in SLOT_SHARE.items()}
        self._clock = clock
        self._metrics = metrics
        self._num_running = 0
        self._changed = asyncio.Event()
        self._empty: dict[TopicPartition, float] = {}  # until when they are not asked again
        self._last_polled: dict[TopicPartition, int] = {}
        self._turn = 0
        self._gaps_due_at = 0.0

    @property
    def num_inflight(self) -> int:
        """Requests that run, and records that are held."""
        return self._num_running + self._admission.num_held

    async def run(self, admit: Callable[[Start, int], None], *, stop: asyncio.Event, until_end: bool) -> None:
        """Call `admit` for what may start, with the number of its log, until `stop`, or with `until_end` until the
        ends seen at the start. What is held at a stop stays for redelivery."""
        while not stop.is_set() and not (until_end and self._assignment.at_ends and not self._admission.num_held):
            await self._start(admit)
            if self._clock.now() >= self._gaps_due_at:
                await self._pass_gaps()
            ready = self._ready()
            if not ready:
                await self._wait_for_change()
                continue
            candidates = self._candidates(ready)
            if not candidates:
                await self._poll_all([tp for tps in ready.values() for tp in tps])
                continue
            cls = self._queue.choose(candidates, self._clock.now())
            assert cls is not None
            tp = min(candidates[cls], key=lambda tp: (self._last_polled.get(tp, 0), tp))
            await self._poll(tp, cls)

    def released(self, record: Record) -> None:
        """A request that was admitted has ended."""
        self._admission.ended(record)
        self._num_running -= 1
        self._changed.set()

    def changed(self) -> None:
        """Something else may let held records start."""
        self._changed.set()

    def _candidates(
        self, ready: Mapping[PriorityClass, Sequence[TopicPartition]]
    ) -> dict[PriorityClass, list[TopicPartition]]:
        """Without those that were empty a moment ago: records may have come, or the client may only now have fetched
        them, and however much the others have, it is their turn to be asked."""
        now = self._clock.now()
        candidates = {}
        for cls, tps in ready.items():
            if left := [tp for tp in tps if self._empty.get(tp, now) <= now]:
                candidates[cls] = left
            else:
                self._queue.empty(cls)
        return candidates

    async def _start(self, admit: Callable[[Start, int], None]) -> None:
        """Start what may; its marks are committed first, with one commit for all."""
        starts = self._admission.start(
            num_running=self._num_running, now=self._clock.now(), wall_ms=self._clock.wall_ms()
        )
        if not starts:
            return
        logs = []
        for start in starts:
            record = start.held.record
            logs.append(self._tracker.started(record.tp, record.offset, alone=start.alone))
            self._num_running += 1
        await self._committer.mark()
        for start, log in zip(starts, logs, strict=True):
            admit(start, log)

    async def _poll(self, tp: TopicPartition, cls: PriorityClass) -> None:
        self._turn += 1
        self._last_polled[tp] = self._turn
        most = min(MAX_RECORDS_PER_POLL, self._tracker.room(tp), self._slots[cls] - self.num_inflight)
        epoch = self._assignment.epoch
        try:
            records = await self._consumer.poll(tp, most, 0)
        except PARTITION_ERRORS as error:  # another replica, or other rights, may still bring them: nothing is skipped
            log.warning("records cannot be read", topic=tp.topic, partition=tp.partition, error=repr(error))
            self._assignment.unreadable[tp] = self._clock.now() + AGAIN_SECONDS
            return
        if records or epoch != self._assignment.epoch:
            await self._deliver(tp, cls, records, epoch)
        else:
            self._empty[tp] = self._clock.now() + IDLE_SECONDS

    async def _poll_all(self, tps: Collection[TopicPartition]) -> None:
        """Where none had records: wait for the first that has. While none has, none is asked alone."""
        epoch = self._assignment.epoch
        try:
            records = await self._consumer.poll_any(tps, IDLE_SECONDS)
        except PARTITION_ERRORS:  # asked one by one, each says whether it is the one
            self._empty.clear()
            return
        if not records:
            self._empty = dict.fromkeys(tps, self._clock.now() + IDLE_SECONDS)
            return
        self._empty.clear()
        tp = records[0].tp
        await self._deliver(tp, self._class_of(tp.topic), records, epoch)

    async def _deliver(self, tp: TopicPartition, cls: PriorityClass, records: Sequence[Record], epoch: int) -> None:
        """Take them, unless they were asked for in another epoch or are of another log."""
        if epoch != self._assignment.epoch:
            self._ask_again(tp)
        elif records[0].offset < self._assignment.expected.get(tp, 0):
            await self._assignment.begin_again(tp)
        else:
            self._take(tp, cls, records)

    def _take(self, tp: TopicPartition, cls: PriorityClass, records: Sequence[Record]) -> None:
        for record in records:
            if self._tracker.arrived(tp, record.offset):
                self._metrics.record_polled(cls)
                self._admission.arrived(Held(record, self._clock.wall_ms()))
        self._backlog.polled(tp, records)
        self._assignment.polled(tp, records[-1].offset + 1)
        self._assignment.unreadable.pop(tp, None)
        self._queue.charge(cls, sum(map(estimated_tokens, records)), self._clock.now())
        self._committer.progressed()  # what is known as done moves the watermark, and nothing else may ever end here

    def _ask_again(self, tp: TopicPartition) -> None:
        """Records that a rebalance overtook are not counted; where the partition is ours they are delivered again."""
        if tp in self._assignment.open:
            next_offset = self._tracker.next_offset(tp)
            offset = self._assignment.starts[tp] if next_offset is None else next_offset
            self._consumer.seek(tp, offset)
            self._assignment.expected[tp] = offset

    async def _pass_gaps(self) -> None:
        """Offsets without records, as compaction and control records leave them, are behind us once the consumer has
        passed them: an end of them would be lag for ever. Nothing else polls, so all that it has given was taken."""
        epoch = self._assignment.epoch
        with contextlib.suppress(TimeoutError, BrokerError):
            async with asyncio.timeout(IDLE_SECONDS):  # known at once, but for one that is being sought
                positions = await self._consumer.positions(frozenset(self._assignment.open))
                if epoch == self._assignment.epoch:
                    self._assignment.passed(positions)
        self._gaps_due_at = self._clock.now() + GAP_SECONDS

    def _ready(self) -> dict[PriorityClass, list[TopicPartition]]:
        paused = self._backpressure.update(self._stats().kv_utilisation, self._clock.now())
        self._pause(frozenset(tp for tp in self._assignment.open if self._class_of(tp.topic) in paused))
        ready: dict[PriorityClass, list[TopicPartition]] = {}
        now, unreadable = self._clock.now(), self._assignment.unreadable
        for tp in self._assignment.open - self._assignment.paused - self._assignment.stuck:
            if now < unreadable.get(tp, now):
                continue
            cls = self._class_of(tp.topic)
            if self.num_inflight < self._slots[cls] and self._tracker.room(tp):
                ready.setdefault(cls, []).append(tp)
        return ready

    def _pause(self, wanted: frozenset[TopicPartition]) -> None:
        before = self._assignment.paused
        if wanted != before:
            self._consumer.pause(wanted - before)
            self._consumer.resume(before - wanted)  # also of partitions that have gone: they may come back
            self._assignment.set_paused(wanted)

    async def _wait_for_change(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_SECONDS):
                await self._changed.wait()
        self._changed.clear()
