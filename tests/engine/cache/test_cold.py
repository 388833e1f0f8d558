"""How requests, running work and the SSD tier share the blocks of the memory."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.cache.cold_admission import ColdAdmission
from engine.cache.cost import GateDecision
from engine.core import EngineCore
from engine.request import RequestStatus

WAIT = 10.0
PROMPT = tuple(range(41))  # ten full blocks and the token that is always computed
OTHER = tuple(range(50, 91))


def run(core: EngineCore, cores: Any, *names_and_prompts: Any, max_tokens: int = 4) -> list[Any]:
    """Answers, checked to be right."""
    requests = [cores.request(name, prompt, max_tokens) for name, prompt in names_and_prompts]
    for request in requests:
        core.add(request)
    finish(core)
    assert all(request.output_token_ids == cores.expected(request) for request in requests)
    return requests


def finish(core: EngineCore) -> None:
    landed = threading.Event()
    cold(core).transfers.on_landed = landed.set
    while core.has_work:
        core.step()
        if core.rest_seconds:
            landed.wait(core.rest_seconds)
            landed.clear()


def cold(core: EngineCore) -> Any:
    assert core.cache.cold is not None
    return core.cache.cold


def written(core: EngineCore) -> None:
    turn = threading.Event()
    for _ in range(int(WAIT * 1000)):
        if not cold(core).transfers.num_unwritten:
            return
        turn.wait(0.001)
    raise AssertionError("blocks were not written")


@pytest.fixture
def core(cores: Any) -> Iterator[EngineCore]:
    """A core whose SSD has PROMPT and OTHER, and whose memory has nothing."""
    opened = cores.open(admission=ColdAdmission.FIRST, num_write_slots=32, has_deadline=False)
    run(opened, cores, ("stored", PROMPT))
    run(opened, cores, ("other", OTHER))
    written(opened)
    opened.cache.pool.evict_all()
    yield opened
    opened.close()


@pytest.fixture
def gate(cores: Any, core: EngineCore) -> Iterator[threading.Event]:
    """Reads wait until it is set; no load is late."""
    opened = threading.Event()

    def wait(data: memoryview) -> None:
        assert opened.wait(WAIT)

    cold(core).cost.block_seconds = 100.0
    cold(core).cost.token_seconds = 1000.0
    cores.disk.on_read = wait
    yield opened
    opened.set()


def test_a_prefix_on_the_ssd_is_loaded_and_only_the_rest_is_computed(cores: Any, core: EngineCore) -> None:
    """Ten blocks come, one token of the prompt is computed; the tokens count for the tier they came from, once."""
    before = core.runner.num_computed  # type: ignore[attr-defined]
    (again,) = run(core, cores, ("again", PROMPT), max_tokens=1)
    assert core.runner.num_computed - before == 1  # type: ignore[attr-defined]
    assert (again.num_cached_tokens, again.num_loaded_tokens) == (40, 40)
    (third,) = run(core, cores, ("third", PROMPT), max_tokens=1)
    assert (third.num_cached_tokens, third.num_loaded_tokens) == (40, 0)
    stats = core.stats()
    assert (stats.cached_prompt_tokens_total, stats.loaded_prompt_tokens_total) == (80, 40)
    assert stats.cold is not None and stats.cold.gate_decisions["load"] == 1
    assert sum(stats.cold.read_latency_counts) == stats.cold.loaded_blocks_total == 10


def test_a_load_in_flight_stops_no_step(cores: Any, core: EngineCore, gate: threading.Event) -> None:
    """Others arrive, run and finish while it is under way; with nothing else to do the engine rests."""
    loading, other = cores.request("loading", PROMPT), cores.request("new", (5, 5, 5, 5, 5))
    core.add(loading)
    core.step()
    assert loading.status is RequestStatus.LOADING and core.rest_seconds is not None and core.rest_seconds > 1
    core.add(other)
    assert core.rest_seconds == 0.0
    for _ in range(4):
        core.step()
    assert other.output_token_ids == cores.expected(other) and loading.status is RequestStatus.LOADING
    gate.set()
    finish(core)
    assert loading.output_token_ids == cores.expected(loading) and loading.num_loaded_tokens == 40


def test_a_load_reserves_all_its_blocks_or_none_and_nobody_blocks_anybody(
    cores: Any, core: EngineCore, gate: threading.Event
) -> None:
    """Two loads that fit are both under way; a third that does not fit holds no block. All end right."""
    third = tuple(range(20, 61))
    run(core, cores, ("third", third))
    written(core)
    core.cache.pool.evict_all()
    requests = [
        cores.request(str(number), prompt, arrival_seconds=float(number))
        for number, prompt in enumerate((PROMPT, OTHER, third))
    ]
    for request in requests:
        core.add(request)
    core.step()
    assert [request.status for request in requests[:2]] == [RequestStatus.LOADING] * 2
    assert cold(core).num_loading_blocks == 20 and cold(core).cost.decisions[GateDecision.SHORTAGE] > 0
    gate.set()
    finish(core)
    assert all(request.output_token_ids == cores.expected(request) for request in requests)


def test_an_abort_while_loading_frees_the_blocks_at_once(cores: Any, core: EngineCore, gate: threading.Event) -> None:
    """And what the disk gives afterwards reaches nobody."""
    core.add(cores.request("loading", PROMPT))
    core.step()
    assert core.cache.pool.num_used == 10
    core.abort("loading")
    core.scheduler.check()
    assert core.cache.pool.num_used == 0 and not core.has_work


def test_running_work_takes_its_blocks_from_loads_first(cores: Any, core: EngineCore, gate: threading.Event) -> None:
    """A running request that grows is not preempted for a load: the load is given up, and its request computes."""
    running = cores.request("running", tuple(range(20, 70)), 40)
    core.add(running)
    while len(running.output_token_ids) < 2:
        core.step()
    loading = cores.request("loading", PROMPT)
    core.add(loading)
    core.step()
    assert loading.status is RequestStatus.LOADING
    while running.status is RequestStatus.RUNNING:
        core.step()
    assert running.num_preemptions == 0
    gate.set()
    finish(core)
    assert all(request.output_token_ids == cores.expected(request) for request in (running, loading))


def test_a_request_behind_a_prefix_that_is_loaded_waits_for_it(
    cores: Any, core: EngineCore, gate: threading.Event
) -> None:
    """It is read once for both."""
    requests = [cores.request(name, (*PROMPT[:40], number), arrival_seconds=number) for number, name in enumerate("ab")]
    for request in requests:
        core.add(request)
    core.step()
    gate.set()
    finish(core)
    assert [request.num_cached_tokens for request in requests] == [40, 40]
    assert cold(core).loaded_blocks == 10


def test_what_is_slower_to_load_than_to_compute_is_computed(cores: Any, core: EngineCore) -> None:
    """The decision is counted, and no block is read for it."""
    cold(core).cost.block_seconds = 100.0
    (again,) = run(core, cores, ("again", PROMPT))
    assert (again.num_cached_tokens, cold(core).cost.decisions[GateDecision.RECOMPUTE]) == (0, 1)


def test_a_preempted_request_is_kept_where_loading_is_the_cheaper_way(cores: Any) -> None:
    """Its blocks go to the SSD without a second touch; where computing is cheaper nothing is written."""
    core = cores.open(num_write_slots=32, has_deadline=False)
    request = cores.request("swapped", PROMPT, 12)
    core.add(request)
    while len(request.output_token_ids) < 4:
        core.step()
    core.preempt_if_running("swapped")
    core.cache.pool.evict_all()  # the room was wanted by somebody at once
    written(core)
    assert cold(core).transfers.tier.num_blocks == 11
    finish(core)
    assert request.output_token_ids == cores.expected(request)
    cold(core).cost.block_seconds = 100.0
    dear = cores.request("dear", OTHER, 12)
    core.add(dear)
    while len(dear.output_token_ids) < 4:
        core.step()
    core.preempt_if_running("dear")
    cold(core).copy_planned()
    written(core)
    assert cold(core).transfers.tier.num_blocks == 11
    finish(core)
    core.close()


def test_the_most_used_prefixes_are_in_memory_after_a_restart(cores: Any, core: EngineCore) -> None:
    """They come before the first prompt, within a quarter of the blocks, a prefix before what follows it."""
    for name in ("once", "twice"):
        run(core, cores, (name, PROMPT))
    core.close()
    core = cores.open(has_deadline=False)
    landed = threading.Event()
    cold(core).transfers.on_landed = landed.set
    core.warm_up()
    assert landed.wait(WAIT)
    core.step()
    assert core.cache.pool.num_cached == cores.num_blocks // 4
    asked = cores.request("asked", PROMPT)
    assert core.cache.attach_prefix(asked) == 4 * (cores.num_blocks // 4)
    core.cache.release(asked)
    core.close()
