import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.broker.api import TopicPartition
from worker.commit_metadata import CommitMetadata, Mark, MarkState
from worker.offsets import OffsetTracker
from worker.partition_state import UNMARKED, PartitionStart

TP = TopicPartition("prompts", 0)
NEVER = PartitionStart(None)


def tracker(window: int = 8, start: PartitionStart = NEVER) -> OffsetTracker:
    made = OffsetTracker(max_inflight_per_partition=window)
    made.assign({TP: start})
    return made


def begin(offsets: OffsetTracker, *numbers: int) -> None:
    for number in numbers:
        assert offsets.arrived(TP, number)
        offsets.started(TP, number)


def committable(offsets: OffsetTracker) -> int | None:
    progress = offsets.to_commit().get(TP)
    return None if progress is None else progress.offset


def test_the_watermark_never_passes_an_unfinished_offset():
    """Out-of-order ends move the watermark only when the oldest is done."""
    offsets = tracker()
    begin(offsets, 5, 6, 7)
    offsets.finished(TP, 6)
    assert committable(offsets) == 5
    offsets.finished(TP, 5)
    assert committable(offsets) == 7
    offsets.finished(TP, 7)
    assert committable(offsets) == 8


def test_gaps_in_offsets_do_not_hold_the_watermark():
    """Compaction and transaction markers leave offsets that nobody ever starts."""
    offsets = tracker()
    begin(offsets, 3, 10, 40)
    for offset in (10, 3, 40):
        offsets.finished(TP, offset)
    assert offsets.watermark(TP) == 41


def test_a_redelivered_offset_is_not_started_twice():
    """After a rebalance the position rewinds; what runs or is done here is known, what only waited is new."""
    offsets = tracker()
    begin(offsets, 0, 1)
    offsets.arrived(TP, 2)
    offsets.finished(TP, 1)
    offsets.hand_over([TP], leased_until_ms=9)
    offsets.assign({TP: PartitionStart(0, end=3)})
    assert not offsets.arrived(TP, 0)
    assert not offsets.arrived(TP, 1)
    assert offsets.arrived(TP, 2)


def test_a_revoked_partition_is_not_committed():
    """Its last progress leases what runs; the end of that changes nothing that is committed."""
    offsets = tracker()
    begin(offsets, 0, 1)
    offsets.finished(TP, 1)
    last = offsets.hand_over([TP], leased_until_ms=77)
    assert last == {TP: (0, CommitMetadata(frozenset({1}), {0: 77}))}
    offsets.finished(TP, 0)
    assert offsets.to_commit() == {}
    assert not offsets.is_assigned(TP)


def test_a_commit_never_goes_backwards():
    """The watermark of a partition that another owner moved on is that owner's."""
    offsets = tracker()
    begin(offsets, 0)
    offsets.hand_over([TP], leased_until_ms=9)
    offsets.assign({TP: PartitionStart(9, end=10)})
    offsets.finished(TP, 0)
    assert offsets.to_commit() == {}
    assert offsets.arrived(TP, 9)
    assert committable(offsets) is None or committable(offsets) >= 9


def test_one_stuck_offset_becomes_backpressure():
    """The window counts finished offsets above the oldest unfinished one."""
    offsets = tracker(window=3)
    begin(offsets, 0, 1, 2)
    offsets.finished(TP, 1)
    offsets.finished(TP, 2)
    assert offsets.room(TP) == 0
    offsets.finished(TP, 0)
    assert offsets.room(TP) == 3


def test_a_smaller_window_than_the_last_owners_wedges_nothing():
    """Done offsets that were not delivered yet take no room."""
    offsets = tracker(window=2, start=PartitionStart(0, CommitMetadata(frozenset(range(1, 9))), 9))
    assert offsets.room(TP) == 2
    begin(offsets, 0)
    assert not offsets.arrived(TP, 1)
    assert offsets.room(TP) == 0
    offsets.finished(TP, 0)
    assert offsets.room(TP) == 2


def test_what_the_last_owner_had_done_is_not_done_again():
    """The done-set of the metadata: only the others are new."""
    offsets = tracker(start=PartitionStart(4, CommitMetadata(frozenset({5, 7})), 9))
    assert [at for at in range(4, 9) if offsets.arrived(TP, at)] == [4, 6, 8]


def test_a_log_made_anew_under_the_same_name_is_read_from_its_start():
    """Offsets of the topic that was deleted say nothing of the new one, and ends of its prompts change nothing."""
    offsets = tracker()
    begin(offsets, 0, 1, 2)
    old = offsets.started(TP, 3) if offsets.arrived(TP, 3) else None
    offsets.finished(TP, 1)
    offsets.committed(offsets.to_commit())
    offsets.hand_over([TP], leased_until_ms=9)
    offsets.assign({TP: PartitionStart(None, end=4)})
    assert all(offsets.arrived(TP, at) for at in range(4))
    offsets.finished(TP, 3, old)
    assert offsets.watermark(TP) == 0
    offsets.check()


def test_marks_of_an_owner_that_vanished_make_suspects_and_a_graceful_one_leaves_none():
    """Only a death while alone counts; what was earned is not forgotten by a graceful end."""
    together, alone, waiting = MarkState
    marks = {0: Mark(together, 0, 1), 1: Mark(alone, 1, 2), 2: Mark(waiting, 2, 5)}
    offsets = tracker(start=PartitionStart(0, CommitMetadata(marks=marks), 5))
    found = {0: Mark(waiting, 0, 2), 1: Mark(waiting, 2, 3), 2: Mark(waiting, 2, 5)}
    assert [offsets.found_mark(TP, at) for at in range(4)] == [*found.values(), UNMARKED]
    for at in range(4):
        offsets.arrived(TP, at)
    offsets.started(TP, 1, alone=True)
    assert offsets.runs_alone
    assert offsets.to_commit()[TP].metadata.marks[1] == Mark(alone, 2, 3)
    offsets.given_up()
    assert offsets.to_commit()[TP].metadata.marks == found


def test_a_lease_is_handed_on_by_an_owner_that_only_held_it():
    """The first owner still answers, whoever has the partition meanwhile."""
    offsets = tracker(start=PartitionStart(0, CommitMetadata(leases={0: 77}), 2))
    offsets.arrived(TP, 0)
    begin(offsets, 1)
    last = offsets.hand_over([TP], leased_until_ms=99)
    assert last[TP].metadata.leases == {0: 77, 1: 99}


@given(st.lists(st.integers(0, 30), unique=True, min_size=1).map(sorted), st.randoms(use_true_random=False))
def test_any_order_of_ends_commits_exactly_up_to_the_oldest_running(started, random):
    """After each end the watermark is the smallest running offset, else one past the last."""
    offsets = tracker(window=100)
    begin(offsets, *started)
    running = list(started)
    random.shuffle(running)
    while running:
        offsets.finished(TP, running.pop())
        offsets.check()
        assert offsets.watermark(TP) == min(running, default=started[-1] + 1)


def test_finishing_what_does_not_run_is_a_fault():
    """A double end would commit past work."""
    offsets = tracker()
    begin(offsets, 0)
    offsets.finished(TP, 0)
    with pytest.raises(KeyError):
        offsets.finished(TP, 0)


def test_a_commit_of_a_log_that_was_forgotten_meanwhile_is_not_the_new_ones():
    """It was on its way when the topic was found to be made anew: the new log is committed from its own beginning."""
    offsets = tracker()
    begin(offsets, *range(50))
    for offset in range(50):
        offsets.finished(TP, offset)
    on_its_way = offsets.to_commit()
    offsets.forget([TP])
    offsets.assign({TP: PartitionStart(None, end=1, first=0)})
    offsets.committed(on_its_way)
    begin(offsets, 0)
    offsets.finished(TP, 0)
    assert committable(offsets) == 1
