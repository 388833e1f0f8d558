"""Sequences larger than the KV memory on a model that is arithmetic: one at a time, beside others, on a bad disk."""

import errno
import random
import threading
import time
from typing import Any

import pytest

from engine.api import FinishReason, PriorityClass
from engine.cache.readers import HUNG_SECONDS
from engine.core import EngineCore
from engine.errors import CacheCapacityError
from engine.request import Request

LONG = 160  # tokens: 40 blocks, where the memory has 24


def text(name: object, length: int, vocabulary: int) -> tuple[int, ...]:
    rng = random.Random(str(name))
    return tuple(rng.randrange(vocabulary) for _ in range(length))


@pytest.fixture
def core(cores: Any) -> Any:
    opened = cores.open(max_model_len=1_000)
    yield opened
    opened.close()


@pytest.fixture
def long(cores: Any) -> Any:
    def make(name: str, length: int = LONG, max_tokens: int = 6, **fields: Any) -> Request:
        request: Request = cores.request(name, text(name, length, cores.vocabulary), max_tokens, **fields)
        return request

    return make


def run(core: EngineCore, *requests: Request, seconds: float = 20.0) -> dict[str, str]:
    """Step until all have ended; the errors by request."""
    for request in requests:
        core.add(request)
    errors: dict[str, str] = {}
    until = time.monotonic() + seconds
    while core.has_work and time.monotonic() < until:
        result = core.step()
        errors |= result.errors
        if not result.advanced:
            time.sleep(0.0002)
    assert not core.has_work, core.scheduler
    return errors


def test_its_answer_is_right_and_it_leaves_nothing_behind(core: Any, cores: Any, long: Any) -> None:
    """All of its blocks are free or cached again, and nothing on the SSD stays pinned."""
    request = long("a")
    assert not run(core, request)
    assert request.output_token_ids == cores.expected(request)
    assert core.cache.pool.num_used == 0 and core.stats().cold.streamed_bytes_total > 0
    assert not core.cache.cold.transfers.tier.index.pinned


def test_the_same_document_again_is_read_from_the_ssd_instead_of_computed(core: Any, cores: Any, long: Any) -> None:
    """A second question about it begins behind all that has been written, counted as loaded."""
    first, again = long("a"), long("a")
    again.request_id = "again"
    run(core, first)
    computed = core.runner.num_computed
    assert not run(core, again)
    assert again.output_token_ids == cores.expected(again)
    assert core.runner.num_computed - computed < LONG // 2
    assert again.num_loaded_tokens > LONG // 2 and again.num_cached_tokens >= again.num_loaded_tokens


def test_what_does_not_fit_memory_and_ssd_is_refused(core: Any, long: Any) -> None:
    """With the same code as without an SSD, and the sum in the message."""
    largest = core.scheduler.lane.max_blocks
    with pytest.raises(CacheCapacityError, match=f"cache and SSD together have {largest}"):
        core.add(long("a", 4 * largest, 1))
    assert 24 < largest <= 24 + 64


def test_without_an_ssd_it_is_refused_as_ever(cores: Any, long: Any, core: Any) -> None:
    """The memory alone counts."""
    plain = EngineCore(core.config, core.runner, check=True)
    with pytest.raises(CacheCapacityError, match="the cache has 24"):
        plain.add(long("a"))


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
            core.add(cores.request(f"s{num_short}", text(num_short, 9, cores.vocabulary), 4))
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


def test_an_abort_in_the_middle_frees_everything(core: Any, long: Any) -> None:
    """Blocks, pins and the lane itself."""
    request = long("a")
    core.add(request)
    while request.num_cold_blocks < 5:
        core.step()
    core.abort("a")
    core.scheduler.check()
    assert not core.has_work and core.cache.pool.num_used == 0 and core.scheduler.lane.request is None
    assert not core.cache.cold.transfers.tier.index.pinned


def test_a_damaged_block_is_computed_again(core: Any, cores: Any, long: Any) -> None:
    """The answer is right, and the disk is not asked for that block any more."""
    request = long("a")
    core.add(request)
    while request.num_cold_blocks < 10:
        core.step()
    cores.disk.on_read = lambda data: data.__setitem__(len(data) - 4095, data[len(data) - 4095] ^ 1)
    tier, until = core.cache.cold.transfers.tier, time.monotonic() + 20
    while not tier.counters.corrupt and time.monotonic() < until:  # a step may find nothing to do before it reads
        assert not core.step().errors
    cores.disk.on_read = lambda data: None
    assert not run(core)
    assert request.output_token_ids == cores.expected(request) and request.num_preemptions == 1


def test_a_disk_that_reads_nothing_back_ends_it_with_an_error_and_nobody_else(core: Any, cores: Any, long: Any) -> None:
    """After it was computed again twice."""

    def fail(data: memoryview) -> None:
        raise OSError(errno.EIO, "Input/output error")

    cores.disk.on_read = fail
    request, short = long("a"), cores.request("short", text("s", 9, cores.vocabulary), 4)
    errors = run(core, request, short)
    assert list(errors) == ["a"] and "could not be read back" in errors["a"]
    assert request.finish_reason is FinishReason.ERROR and short.output_token_ids == cores.expected(short)


def test_a_disk_that_takes_nothing_ends_it_with_an_error_and_nobody_else(core: Any, cores: Any, long: Any) -> None:
    """Each block is tried three times."""

    def fail(data: memoryview) -> None:
        raise OSError(errno.EIO, "Input/output error")

    cores.disk.on_write = fail
    request, short = long("a"), cores.request("short", text("s", 9, cores.vocabulary), 4)
    errors = run(core, request, short)
    assert list(errors) == ["a"] and "does not take its blocks" in errors["a"]
    assert short.output_token_ids == cores.expected(short) and core.cache.pool.num_used == 0


def test_a_disk_that_hangs_ends_it_with_an_error_and_nobody_else(cores: Any, long: Any) -> None:
    """At once: nobody waits for such a disk, and it is not asked for the same again."""
    now = [100.0]
    core = cores.open(max_model_len=1_000, clock=lambda: now[0])
    request, short = long("a"), cores.request("short", text("s", 9, cores.vocabulary), 4)
    core.add(request)
    while request.num_cold_blocks < 5:
        core.step()
    opened = threading.Event()

    def hang(data: memoryview) -> None:
        now[0] += HUNG_SECONDS + 1
        opened.wait(10)

    cores.disk.on_read = hang
    errors = run(core, short)
    opened.set()
    assert errors == {"a": "the SSD does not answer"} and request.finish_reason is FinishReason.ERROR
    assert short.output_token_ids == cores.expected(short) and request.num_preemptions == 0
    core.close()


def test_its_blocks_are_not_dropped_from_a_full_ssd(core: Any, cores: Any, long: Any) -> None:
    """Others write through meanwhile, much more than fits, and give way to each other instead."""
    request = long("a", 100, 40)
    core.add(request)
    number = 0
    until = time.monotonic() + 20
    while request.finish_reason is None and time.monotonic() < until:
        if len(core._requests) < 3:
            number += 1
            prompt = text(number // 2, 30, cores.vocabulary)
            core.add(cores.request(f"s{number}", prompt, 1))
        core.step()
    assert request.output_token_ids == cores.expected(request) and request.num_preemptions == 0


@pytest.mark.parametrize("seed", range(3))
def test_600_random_events_with_long_sequences_keep_every_answer_right(seed: int, cores: Any) -> None:
    """Arrivals of all sizes, aborts, preemptions, evictions, failing steps, damaged and refused blocks: `check()` after
    every step, and every finished answer is the right one."""
    rng = random.Random(seed)

    def damage(data: memoryview) -> None:
        if rng.random() < 0.003:
            data[rng.randrange(len(data) // 4096) * 4096 + rng.randrange(4)] ^= 1 << rng.randrange(8)
        if rng.random() < 0.003:
            raise OSError(errno.EIO, "Input/output error")

    cores.disk.on_read = damage
    core = cores.open(max_model_len=1_000)
    alive: dict[str, Request] = {}
    finished: list[Request] = []

    def settle(results: list[Request]) -> None:
        for request in results:
            alive.pop(request.request_id, None)
            if request.finish_reason is FinishReason.LENGTH:
                finished.append(request)
                assert request.output_token_ids == cores.expected(request)

    for event in range(600):
        kind = rng.random()
        if kind < 0.3 and len(alive) < 12:
            length = rng.choice((5, 12, 30, 60, 100, 150))
            prompt = text(rng.randrange(4), length, cores.vocabulary)
            priority = rng.choice(list(PriorityClass))
            added = cores.request(
                f"r{event}", prompt, rng.randrange(1, 12), priority=priority, arrival_seconds=time.monotonic()
            )
            core.add(added)
            alive[added.request_id] = added
        elif kind < 0.34 and alive:
            core.abort(alive.pop(rng.choice(list(alive))).request_id)
        elif kind < 0.38 and alive:
            core.preempt_if_running(rng.choice(list(alive)))
        elif kind < 0.42:
            core.cache.pool.evict_all()
        elif kind < 0.43:
            core.runner.fail_next = True
        settle(core.step().finished)
        core.scheduler.check()
    until = time.monotonic() + 20
    while core.has_work and time.monotonic() < until:
        settle(core.step().finished)
    assert not core.has_work, core.scheduler
    core.close()
    core.cache.pool.evict_all()
    core.scheduler.check()
    assert core.cache.pool.num_used == 0
    assert len(finished) > 30 and sum(request.num_prompt_tokens >= 100 for request in finished) > 3
