import pytest

from engine.api import PriorityClass
from worker.backpressure import DEFAULT_THRESHOLDS, Backpressure, Thresholds

URGENT, STANDARD, BULK = PriorityClass


def test_bulk_pauses_first_and_urgent_last():
    """Each threshold stops one class more."""
    gate = Backpressure()
    paused = [gate.update(use, 0.0) for use in (0.5, 0.86, 0.93, 0.99)]
    assert paused == [frozenset(), {BULK}, {BULK, STANDARD}, {BULK, STANDARD, URGENT}]


def test_a_class_resumes_below_the_lower_threshold_only():
    """Between the thresholds nothing changes."""
    gate = Backpressure(dwell_seconds=0)
    gate.update(0.9, 0.0)
    assert gate.update(0.8, 1.0) == {BULK}
    assert gate.update(0.7, 1.0) == frozenset()


def test_a_pause_lasts_for_the_dwell_time():
    """A short dip does not make intake flap."""
    gate = Backpressure(dwell_seconds=2)
    gate.update(0.9, 10.0)
    assert gate.update(0.1, 11.9) == {BULK}
    assert gate.update(0.1, 12.0) == frozenset()


def test_thresholds_in_the_wrong_order_are_refused():
    """Urgent must not pause before bulk."""
    with pytest.raises(ValueError, match="bulk must pause first"):
        Backpressure({**DEFAULT_THRESHOLDS, URGENT: Thresholds(0.5, 0.4)})
    with pytest.raises(ValueError, match="resume_at < pause_at"):
        Thresholds(0.5, 0.6)
