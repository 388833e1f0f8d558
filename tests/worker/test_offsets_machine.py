"""Random histories of one partition and two workers, judged by a ledger that the tracker never sees."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker.broker.api import TopicPartition
from worker.commit_metadata import CommitMetadata, MetadataCodec
from worker.offsets import OffsetTracker
from worker.partition_state import PartitionStart

TP = TopicPartition("prompts", 0)
WINDOW = 4
LEASE_MS = 50


@dataclass
class Worker:
    """A process: its tracker, and what it holds and runs."""

    tracker: OffsetTracker = field(default_factory=lambda: OffsetTracker(max_inflight_per_partition=WINDOW))
    held: list[int] = field(default_factory=list)
    running: dict[int, int] = field(default_factory=dict)


class Deliveries(RuleBasedStateMachine):
    """The broker is a list of offsets, one commit and one owner; `answered` is what clients have read."""

    @initialize(codec_name=st.sampled_from(["cluster", ""]))
    def begin(self, codec_name: str) -> None:
        self.codec = MetadataCodec()
        self.codec.bind(codec_name)
        self.offsets: list[int] = []
        self.end = 0
        self.answered: dict[int, int] = {}
        self.commit: tuple[int, str] | None = None
        self.workers = [Worker(), Worker()]
        self.owner: int | None = None
        self.position = 0
        self.now = 1000

    @rule(gap=st.integers(0, 3), num=st.integers(1, 4))
    def append(self, gap: int, num: int) -> None:
        self.end += gap
        self.offsets += range(self.end, self.end + num)
        self.end += num

    @rule(to=st.integers(0, 1), acknowledged=st.booleans(), mangle=st.sampled_from(["no", "drop", "shift"]))
    def rebalance(self, to: int, acknowledged: bool, mangle: str) -> None:
        """The owner is told and hands over (its commit may be lost); then `to` begins. Metadata may be lost, or come
        with another offset than it was made for."""
        if self.owner is not None:
            old = self.workers[self.owner]
            last = old.tracker.hand_over([TP], leased_until_ms=self.now + LEASE_MS)
            old.held.clear()
            if acknowledged:
                self._commit(old, last)
        new = self.workers[to]
        if mangle != "no" and self.commit is not None:
            self.commit = (self.commit[0], "" if mangle == "drop" else self._foreign())
        offset = None if self.commit is None else self.commit[0]
        start = PartitionStart(None, end=self.end, first=0)
        if self.commit is not None:
            found = self.codec.decode(TP, self.commit[1], base=self.commit[0], end=self.end)
            start = PartitionStart(offset, found, self.end)
        self.workers[1 - to].tracker.assign({})
        self.workers[1 - to].held.clear()
        new.held.clear()
        new.tracker.assign({TP: start})
        self.owner, self.position = to, offset or 0

    def _foreign(self) -> str:
        """What a mirror would leave: the metadata of another base."""
        assert self.commit is not None
        base = self.commit[0] + 1
        found = self.codec.decode(TP, self.commit[1], base=self.commit[0], end=self.end)
        done = frozenset(offset for offset in found.done if offset >= base)
        leases, marks = ({at: v for at, v in table.items() if at >= base} for table in (found.leases, found.marks))
        return self.codec.encode(TP, base, CommitMetadata(done, leases, marks))

    @precondition(lambda self: self.owner is not None)
    @rule(most=st.integers(1, WINDOW))
    def deliver(self, most: int = 1) -> None:
        worker = self.workers[self.owner]
        coming = [offset for offset in self.offsets if offset >= self.position]
        for offset in coming[: min(most, worker.tracker.room(TP))]:
            self.position = offset + 1
            if worker.tracker.arrived(TP, offset):
                assert offset not in worker.running, "started twice in one process"
                worker.held.append(offset)

    @precondition(lambda self: self.owner is not None)
    @rule(most=st.integers(1, WINDOW))
    def start(self, most: int = WINDOW) -> None:
        worker = self.workers[self.owner]
        for offset in worker.held[:most]:
            lease = worker.tracker.lease_until_ms(TP, offset)
            if lease is None or lease <= self.now:
                worker.held.remove(offset)
                worker.running[offset] = worker.tracker.started(TP, offset)

    @rule(at=st.integers(0, 1), pick=st.integers(0, 10), told=st.booleans())
    def finish(self, at: int, pick: int, told: bool) -> None:
        """A client reads an answer; a former owner tells the new one, or its word is lost."""
        if not self.workers[at].running:
            at = 1 - at
        worker, other = self.workers[at], self.workers[1 - at]
        if not worker.running:
            return
        offset = sorted(worker.running)[pick % len(worker.running)]
        self.answered[offset] = self.answered.get(offset, 0) + 1
        worker.tracker.finished(TP, offset, worker.running.pop(offset))
        if told and self.owner == 1 - at and offset in other.held and other.tracker.lease_until_ms(TP, offset):
            other.held.remove(offset)
            other.tracker.finished(TP, offset)

    @rule()
    def time_passes(self) -> None:
        self.now += LEASE_MS

    @rule(at=st.integers(0, 1))
    def commit_what_may_be(self, at: int) -> None:
        worker = self.workers[at]
        progress = worker.tracker.to_commit()
        assert at == self.owner or not progress, "a commit for a partition that is not assigned"
        self._commit(worker, progress)

    def _commit(self, worker: Worker, progress: dict) -> None:
        for offset, metadata in progress.values():
            assert self.commit is None or offset >= self.commit[0], "a commit goes backwards"
            assert set(metadata.done) <= self.answered.keys(), "called done, and never answered"
            text = self.codec.encode(TP, offset, metadata)
            assert len(text) <= 3000
            self.commit = (offset, text)
        worker.tracker.committed(progress)

    @rule(at=st.integers(0, 1), really=st.sampled_from([False, False, True]))
    def crash(self, at: int, really: bool = True) -> None:
        if not really:
            return
        self.workers[at] = Worker()
        if self.owner == at:
            self.owner = None

    @invariant()
    def nothing_committed_is_unanswered(self) -> None:
        if self.commit is not None:
            assert {offset for offset in self.offsets if offset < self.commit[0]} <= self.answered.keys()

    @invariant()
    def the_trackers_agree_with_themselves(self) -> None:
        for worker in self.workers:
            worker.tracker.check()
            assert len(worker.held) + len(worker.running) <= 2 * WINDOW  # strays beside a full window

    def teardown(self) -> None:
        """In the end one fresh worker answers and commits everything that is left."""
        if not hasattr(self, "offsets"):
            return
        self.crash(0)
        self.crash(1)
        self.rebalance(0, acknowledged=True, mangle="no")
        for _ in range(2 * len(self.offsets) + 1):
            self.deliver()
            self.time_passes()
            self.start()
            self.finish(0, 0, told=False)
        self.commit_what_may_be(0)
        assert set(self.offsets) <= self.answered.keys(), "lost"
        if self.offsets:
            assert self.commit is not None
            assert self.commit[0] >= self.offsets[-1] + 1
        self.nothing_committed_is_unanswered()


TestDeliveries = Deliveries.TestCase
TestDeliveries.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("stop", range(3))
def test_the_shortest_history_that_once_lost_a_prompt(stop: int) -> None:
    """What only waited at a revoke is delivered again, although later offsets run here and are done."""
    machine = Deliveries()
    machine.begin("cluster")
    machine.append(0, 4)
    machine.rebalance(0, acknowledged=True, mangle="no")
    for _ in range(4):
        machine.deliver()
    machine.start()
    machine.finish(0, stop, told=False)
    machine.rebalance(1, acknowledged=True, mangle="no")
    machine.rebalance(0, acknowledged=True, mangle="no")
    machine.nothing_committed_is_unanswered()
    machine.teardown()
