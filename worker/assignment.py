"""Which partitions this worker may poll now, and from where. The listener of rebalances; waits for no generation."""

import asyncio
import contextlib
from collections.abc import Collection, Mapping

import structlog

from engine.flight import MAX_NAMED, FlightRecorder
from worker.admission import Admission
from worker.broker.api import BrokerError, Consumer, TopicPartition
from worker.clock import Clock
from worker.commit_metadata import MetadataCodec
from worker.committer import Committer
from worker.offsets import OffsetTracker
from worker.partition_state import PartitionStart

REVOKE_COMMIT_SECONDS = 1.0

log = structlog.get_logger(__name__)


class Assignment:
    """A partition is open from the moment its start is known until it is revoked. `epoch` changes with every step of
    a rebalance: records that were asked for in another one may not be counted."""

    def __init__(
        self,
        tracker: OffsetTracker,
        admission: Admission,
        codec: MetadataCodec,
        clock: Clock,
        flight: FlightRecorder,
        *,
        from_beginning: bool,
        max_replay_age_seconds: float,
        lease_seconds: float,
    ) -> None:
        self.epoch = 0
        self.open: set[TopicPartition] = set()
        self.ends: dict[TopicPartition, int] = {}
        self.positions: dict[TopicPartition, int] = {}
        self.starts: dict[TopicPartition, int] = {}
        self.expected: dict[TopicPartition, int] = {}  # the lowest offset that may come next
        self.paused: frozenset[TopicPartition] = frozenset()
        self.stuck: set[TopicPartition] = set()  # a dead letter of theirs finds no place
        self.unreadable: dict[TopicPartition, float] = {}  # until when they are not asked again
        self.known = asyncio.Event()
        self._tracker = tracker
        self._admission = admission
        self._codec = codec
        self._clock = clock
        self._flight = flight
        self._anew: set[TopicPartition] = set()  # their commits are of another log
        self._lease_ms = int(lease_seconds * 1000)
        self._from_beginning = from_beginning
        self._max_replay_age = max_replay_age_seconds
        self._consumer: Consumer | None = None
        self._committer: Committer | None = None

    def bind(self, consumer: Consumer, committer: Committer) -> None:
        """Name the consumer that calls this listener; before it starts."""
        self._consumer, self._committer = consumer, committer

    async def on_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self._recorded("revoked", revoked)
        self.epoch += 1
        self.open -= set(revoked)
        assert self._committer is not None
        self._admission.forget(revoked)
        last = self._tracker.hand_over(revoked, leased_until_ms=self._clock.wall_ms() + self._lease_ms)
        with contextlib.suppress(BrokerError, TimeoutError):
            async with asyncio.timeout(REVOKE_COMMIT_SECONDS):
                await self._committer.hand_over(last)

    async def on_assigned(self, assigned: Collection[TopicPartition]) -> None:
        consumer = self._consumer
        assert consumer is not None
        consumer.pause(self.paused & set(assigned))
        self._recorded("assigned", assigned)
        self.epoch += 1
        epoch = self.epoch
        self.open.clear()
        self.unreadable.clear()
        committed = await consumer.committed(assigned)
        ends = await consumer.end_offsets(assigned)
        beyond = {tp for tp, commit in committed.items() if commit is not None and commit.offset > ends[tp]}
        anew = beyond | (self._anew & set(assigned))
        committed |= dict.fromkeys(anew)
        starts = {tp: commit.offset for tp, commit in committed.items() if commit is not None}
        fresh = [tp for tp in assigned if tp not in starts]
        if fresh:
            # of our own partitions: another new member may have committed its starts a moment ago
            everything = self._from_beginning and not starts
            since = 0 if everything else self._clock.wall_ms() - int(self._max_replay_age * 1000)
            for tp, offset in (await consumer.offsets_for_time(fresh, since)).items():
                starts[tp] = ends[tp] if offset is None else offset
        if epoch != self.epoch:  # they were taken away again meanwhile
            return
        if anew:
            log.warning("partitions were made anew, their commits are of another log", partitions=sorted(anew))
            self._tracker.forget(anew)
            self._anew -= anew
        found = {}
        for tp in assigned:
            commit = committed.get(tp)
            if commit is None:
                found[tp] = PartitionStart(None, end=ends[tp], first=starts[tp])
            else:
                metadata = self._codec.decode(tp, commit.metadata, base=commit.offset, end=ends[tp])
                found[tp] = PartitionStart(commit.offset, metadata, ends[tp])
            consumer.seek(tp, starts[tp])  # also where it is there already: a poll may have passed it meanwhile
        self._admission.forget_all()
        self._tracker.assign(found)
        self.starts = starts
        self._admission.assigned(self._clock.now())
        for tp in anew:
            self.positions.pop(tp, None)
            self.ends.pop(tp, None)
        self.positions = {tp: max(starts[tp], self.positions.get(tp, 0)) for tp in assigned}
        self.expected = dict(starts)
        for tp in assigned:
            self.ends.setdefault(tp, ends[tp])
        self.epoch += 1
        self.open = set(assigned)
        self.known.set()
        # A start that is not committed would be another one after an outage, and pass what came meanwhile; and what was
        # done when a commit was refused may be all that ever happens on the partition.
        assert self._committer is not None
        self._committer.progressed()

    async def begin_again(self, tp: TopicPartition) -> None:
        """A lower offset came than the one after the last: the log is another one that was made under the same name.
        Everything begins again as after a rebalance, this partition as if nothing of it had been committed."""
        self._anew.add(tp)
        try:
            await self.on_assigned(frozenset(self.open))
        except BrokerError as error:  # nothing is open now, which the watchdog mends, and is no end of what there was
            self.known.clear()
            log.warning("a partition that was made anew cannot begin yet", error=str(error) or type(error).__name__)

    def _recorded(self, kind: str, tps: Collection[TopicPartition]) -> None:
        named = [f"{tp.topic}:{tp.partition}" for tp in sorted(tps)[:MAX_NAMED]]
        self._flight.record(kind, self._clock.now(), count=len(tps), partitions=named)

    def set_paused(self, tps: frozenset[TopicPartition]) -> None:
        """These, and no others, are paused now, also after a rebalance."""
        self.paused = tps
        self._recorded("paused", tps)

    def polled(self, tp: TopicPartition, next_offset: int) -> None:
        """Everything before `next_offset` has been taken."""
        self.positions[tp] = max(next_offset, self.positions.get(tp, 0))
        self.expected[tp] = next_offset

    def passed(self, positions: Mapping[TopicPartition, int]) -> None:
        """The consumer has these with nothing on its way to us: what lies between is a gap, and may be committed."""
        for tp, position in positions.items():
            if tp in self.open and position > self.positions[tp]:
                self._tracker.passed(tp, position)
                self.polled(tp, position)
                assert self._committer is not None
                self._committer.progressed()

    @property
    def unready(self) -> str | None:
        """Why some or all partitions are not served; None when all are."""
        if not self.known.is_set():
            return "not in the group yet"
        for tps, why in ((self.stuck, "a dead letter finds no place"), (self.unreadable, "records cannot be read")):
            if tps:
                return f"{why}: {', '.join(f'{tp.topic}[{tp.partition}]' for tp in sorted(tps))}"
        return None

    @property
    def at_ends(self) -> bool:
        """Whether all that was there when each partition came to us has been polled."""
        return self.known.is_set() and not self.behind

    @property
    def behind(self) -> dict[TopicPartition, int]:
        """Position of each open partition that was not polled to the end that was there when it came to us."""
        return {tp: self.positions[tp] for tp in self.open if self.positions[tp] < self.ends[tp]}
