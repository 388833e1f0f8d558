"""Who is in the lane of long sequences, who runs beside it, and who makes it give way."""

import time
from typing import Any

import pytest

from engine.api import FinishReason, PriorityClass
from engine.request import Request

LONG = 160  # tokens of `long`


@pytest.fixture
def core(cores: Any) -> Any:
    opened = cores.open(max_model_len=1_000)
    yield opened
    opened.close()


def test_one_is_in_the_lane_and_further_ones_wait(core: Any, cores: Any, long: Any) -> None:
    """In the order of their coming."""
    requests = [long(name, arrival_seconds=float(index)) for index, name in enumerate("abc")]
    ended: list[str] = []
    for request in requests:
        core.add(request)
    until = time.monotonic() + 20
    while core.has_work and time.monotonic() < until:
        ended += [request.request_id for request in core.step().finished]
        assert core.stats().num_in_lane + core.stats().num_waiting_for_lane <= 3 - len(ended)
    assert ended == ["a", "b", "c"]
    assert all(request.output_token_ids == cores.expected(request) for request in requests)


def test_others_run_between_its_steps(core: Any, cores: Any, long: Any) -> None:
    """Short answers come while it is in the lane, and it comes to its end while short ones keep coming."""
    request = long("a", max_tokens=30)
    core.add(request)
    num_short, alive = 0, 0
    until = time.monotonic() + 20
    while request.finish_reason is None and time.monotonic() < until:
        if alive < 2:
            num_short += 1
            alive += 1
            core.add(cores.request(f"s{num_short}", cores.text(num_short, 9), 4))
        for ended in core.step().finished:
            alive -= ended is not request
    assert request.finish_reason is FinishReason.LENGTH and request.output_token_ids == cores.expected(request)
    assert num_short > 10


def test_it_gives_way_to_a_large_request_that_is_urgent(core: Any, cores: Any, long: Any) -> None:
    """One that the rest of the memory does not hold; what had been written is not computed again."""
    request, urgent = long("a"), long("u", 70, 4, priority=PriorityClass.URGENT)
    core.add(request)
    while request.num_cold_blocks < 10:
        core.step()
    core.add(urgent)
    ended: list[Request] = []
    until = time.monotonic() + 20
    while core.has_work and time.monotonic() < until:
        ended += core.step().finished
    assert ended == [urgent, request] and request.num_preemptions == 1
    assert all(r.output_token_ids == cores.expected(r) for r in ended)
    assert core.runner.num_computed < LONG + 70 + 80
