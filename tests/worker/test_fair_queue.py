from collections import Counter

import pytest

from engine.api import PriorityClass
from worker.fair_queue import FairQueue

URGENT, STANDARD, BULK = PriorityClass
WEIGHTS = {URGENT: 4.0, STANDARD: 2.0, BULK: 1.0}


def test_busy_classes_share_tokens_by_weight():
    """Each record of bulk is ten times longer, and still tokens, not records, are shared 4:2:1."""
    queue = FairQueue(WEIGHTS, max_age_seconds=1e9)
    cost = {URGENT: 100, STANDARD: 100, BULK: 1000}
    served: Counter[PriorityClass] = Counter()
    for step in range(20_000):
        cls = queue.choose(set(PriorityClass), float(step))
        queue.charge(cls, cost[cls], float(step))
        served[cls] += cost[cls]
    assert served[URGENT] / served[BULK] == pytest.approx(4, rel=0.05)
    assert served[STANDARD] / served[BULK] == pytest.approx(2, rel=0.05)


def test_the_most_urgent_class_goes_first():
    """With credit on all sides the order of definition decides."""
    assert FairQueue(WEIGHTS).choose({BULK, URGENT}, 0.0) is URGENT


def test_a_class_that_waited_too_long_is_served():
    """Ageing beats weights."""
    queue = FairQueue({URGENT: 1e9, STANDARD: 1.0, BULK: 1.0}, max_age_seconds=10)
    for second in range(10):
        assert queue.choose({URGENT, BULK}, float(second)) is URGENT
        queue.charge(URGENT, 10, float(second))
    assert queue.choose({URGENT, BULK}, 10.5) is BULK


def test_an_idle_class_saves_no_credit():
    """Nothing to do now gives no burst later."""
    queue = FairQueue(WEIGHTS)
    queue.choose(set(PriorityClass), 0.0)
    queue.empty(URGENT)
    assert queue.choose({STANDARD, BULK}, 0.0) is STANDARD


def test_asking_an_empty_class_takes_its_credit():
    """Work that comes right after waits for the round that is going on, and a debt stays a debt."""
    queue = FairQueue(WEIGHTS, max_age_seconds=1e9)
    queue.choose(set(PriorityClass), 0.0)
    queue.empty(URGENT)
    assert queue.choose(set(PriorityClass), 0.0) is STANDARD


def test_nobody_ready_is_nobody():
    """No class is made up."""
    assert FairQueue(WEIGHTS).choose((), 0.0) is None
