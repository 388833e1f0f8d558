"""Who is in the lane of long sequences, who runs beside it, and who makes it give way."""

import time
from typing import Any

from engine.api import FinishReason, PriorityClass
from engine.request import Request, RequestStatus


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
    assert core.runner.num_computed < request.num_prompt_tokens + 70 + 80


def test_it_does_not_starve_behind_large_requests_that_keep_coming(core: Any, cores: Any, long: Any) -> None:
    """Once it has aged, younger ones wait until it has been in the lane."""
    request = long("a")
    ended: list[Request] = []
    core.add(long("l0", 70, 4, arrival_seconds=1.0))
    core.step()
    core.add(request)
    until = time.monotonic() + 20
    while request.finish_reason is None and time.monotonic() < until:
        while len(core._requests) < 3:
            number = len(ended) + len(core._requests)
            core.add(long(f"l{number}", 70, 4, arrival_seconds=float(number)))
        ended += core.step().finished
    assert request.output_token_ids == cores.expected(request) and len(ended) < 5
    assert not cores.run(core)


def test_large_requests_that_have_aged_get_their_turn_beside_it(core: Any, cores: Any, long: Any) -> None:
    """One that came later waits until the sequence in the lane has been there for as long as it takes to age; then
    it is the lane's turn again. Small ones do not wait behind it."""
    now = [1_000.0]
    core._clock = lambda: now[0]
    request, small = long("a", max_tokens=30), cores.request("s", cores.text("s", 9), 4, arrival_seconds=1_027.0)
    large = [long(f"l{number}", 70, 4, arrival_seconds=995.0 + number) for number in range(2)]
    core.add(request)
    core.step()
    for one in large:
        core.add(one)
    now[0] = 1_027.0  # they have aged
    core.add(small)
    for _ in range(12):
        core.step()
    assert core.scheduler.lane.request is request and small.finish_reason is FinishReason.LENGTH
    now[0] = 1_031.0  # and it has had its turn
    core.step()
    assert core.scheduler.lane.request is None and large[0].status is RequestStatus.RUNNING
    ended: list[Request] = []
    until = time.monotonic() + 20
    while core.has_work and time.monotonic() < until:
        ended += core.step().finished
    assert ended == [large[0], request, large[1]] and request.num_preemptions == 1
    assert all(r.output_token_ids == cores.expected(r) for r in ended)


def test_a_large_request_whose_step_failed_is_tried_again_before_one_gets_the_lane(
    core: Any, cores: Any, long: Any
) -> None:
    """It has to run alone, and nobody else may until it has."""
    large, request = long("l", 70, 4, arrival_seconds=1e12), long("a", arrival_seconds=1e12)  # neither ages
    core.add(large)
    core.step()
    core.add(request)
    core.runner.fail_next = True
    core.step()
    assert large.num_failed_steps == 1
    core.step()
    assert large.status is RequestStatus.RUNNING and core.scheduler.lane.request is None
    assert not cores.run(core)
    assert all(r.output_token_ids == cores.expected(r) for r in (large, request))
