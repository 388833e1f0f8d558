import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.broker.api import TopicPartition
from worker.offsets import OffsetTracker

TP = TopicPartition("prompts", 0)


def tracker(window: int = 8) -> OffsetTracker:
    made = OffsetTracker(max_inflight_per_partition=window)
    made.assign({TP: None})
    return made


def test_the_watermark_never_passes_an_unfinished_offset():
    """Out-of-order ends move the watermark only when the oldest is done."""
    offsets = tracker()
    for offset in (5, 6, 7):
        assert offsets.started(TP, offset)
    offsets.finished(TP, 6)
    assert offsets.to_commit() == {TP: 5}
    offsets.finished(TP, 5)
    assert offsets.to_commit() == {TP: 7}
    offsets.finished(TP, 7)
    assert offsets.to_commit() == {TP: 8}


def test_gaps_in_offsets_do_not_hold_the_watermark():
    """Compaction and transaction markers leave offsets that nobody ever starts."""
    offsets = tracker()
    for offset in (3, 10, 40):
        offsets.started(TP, offset)
    for offset in (10, 3, 40):
        offsets.finished(TP, offset)
    assert offsets.watermark(TP) == 41


def test_a_redelivered_offset_is_not_started_twice():
    """After a rebalance the position rewinds; what runs or is done here is known."""
    offsets = tracker()
    offsets.started(TP, 0)
    offsets.started(TP, 1)
    offsets.finished(TP, 1)
    offsets.revoke([TP])
    offsets.assign({TP: 0})
    assert not offsets.started(TP, 0)
    assert not offsets.started(TP, 1)
    assert offsets.started(TP, 2)


def test_a_revoked_partition_is_not_committed():
    """Work on it goes on, and its end changes nothing that is committed."""
    offsets = tracker()
    offsets.started(TP, 0)
    offsets.revoke([TP])
    offsets.finished(TP, 0)
    assert offsets.to_commit() == {}
    offsets.assign({})
    offsets.assign({TP: 0})
    assert offsets.started(TP, 0)


def test_a_commit_never_goes_backwards():
    """The watermark of a partition that another owner moved on is that owner's."""
    offsets = tracker()
    offsets.started(TP, 0)
    offsets.revoke([TP])
    offsets.assign({TP: 9})
    offsets.finished(TP, 0)
    assert offsets.to_commit() == {}
    assert offsets.started(TP, 9)


def test_one_stuck_offset_becomes_backpressure():
    """The window counts finished offsets above the oldest unfinished one."""
    offsets = tracker(window=3)
    for offset in range(3):
        offsets.started(TP, offset)
    offsets.finished(TP, 1)
    offsets.finished(TP, 2)
    assert offsets.room(TP) == 0
    offsets.finished(TP, 0)
    assert offsets.room(TP) == 3


@given(st.lists(st.integers(0, 30), unique=True, min_size=1).map(sorted), st.randoms(use_true_random=False))
def test_any_order_of_ends_commits_exactly_up_to_the_oldest_running(started, random):
    """After each end the watermark is the smallest running offset, else one past the last."""
    offsets = tracker(window=100)
    for offset in started:
        offsets.started(TP, offset)
    running = list(started)
    random.shuffle(running)
    while running:
        offsets.finished(TP, running.pop())
        offsets.check()
        assert offsets.watermark(TP) == min(running, default=started[-1] + 1)


def test_finishing_what_does_not_run_is_a_fault():
    """A double end would commit past work."""
    offsets = tracker()
    offsets.started(TP, 0)
    offsets.finished(TP, 0)
    with pytest.raises(KeyError):
        offsets.finished(TP, 0)
