"""Sequences larger than the KV memory on a model that is arithmetic: right answers, and nothing left behind."""

import errno
import random
import time
from typing import Any

import pytest

from engine.api import FinishReason, PriorityClass
from engine.core import EngineCore
from engine.errors import CacheCapacityError
from engine.request import Request


def test_its_answer_is_right_and_it_leaves_nothing_behind(core: Any, cores: Any, long: Any) -> None:
    """All of its blocks are free or cached again, and nothing on the SSD stays pinned."""
    request = long("a")
    assert not cores.run(core, request)
    assert request.output_token_ids == cores.expected(request)
    assert core.cache.pool.num_used == 0 and core.stats().cold.streamed_bytes_total > 0
    assert not core.cache.cold.transfers.tier.index.pinned


def test_the_same_document_again_is_read_from_the_ssd_instead_of_computed(core: Any, cores: Any, long: Any) -> None:
    """A second question about it begins behind all that has been written, counted as loaded."""
    first, again = long("a"), long("a")
    again.request_id = "again"
    cores.run(core, first)
    computed = core.runner.num_computed
    assert not cores.run(core, again)
    assert again.output_token_ids == cores.expected(again)
    half = first.num_prompt_tokens // 2
    assert core.runner.num_computed - computed < half
    assert again.num_loaded_tokens > half and again.num_cached_tokens >= again.num_loaded_tokens


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
            prompt = cores.text(rng.randrange(4), length)
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
