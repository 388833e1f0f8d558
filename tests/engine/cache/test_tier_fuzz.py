"""The engine's bookkeeping over all tiers, under random work on a disk that fails at random."""

import errno
import random
import time
from typing import Any

import pytest

from engine.api import FinishReason, PriorityClass
from engine.cache.cost import GateDecision
from engine.request import Request


class Faults:
    """What the disk does to a call: nothing most of the time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_damaged = 0

    def read(self, data: memoryview) -> None:
        kind = self.rng.random()
        if kind < 0.01:
            data[self.rng.randrange(len(data) // 4096) * 4096 + self.rng.randrange(4)] ^= 1 << self.rng.randrange(8)
            self.num_damaged += 1
        elif kind < 0.02:
            raise OSError(errno.EIO, "Input/output error")
        elif kind < 0.025:
            time.sleep(0.02)

    def write(self, data: memoryview) -> None:
        if self.rng.random() < 0.002:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("seed", range(4))
def test_2_500_random_events_over_all_tiers_keep_every_answer_right(seed: int, cores: Any) -> None:
    """Arrivals, aborts, preemptions, evictions, failing steps, restarts, damaged, late and refused blocks: `check()`
    after every step, and every finished answer is the right one."""
    rng = random.Random(seed)
    faults = Faults(rng)
    cores.disk.on_read, cores.disk.on_write = faults.read, faults.write
    core = cores.open()
    stems = [tuple(rng.randrange(cores.vocabulary) for _ in range(40)) for _ in range(6)]
    alive: dict[str, Request] = {}
    num_finished = num_loaded = 0

    def settle(results: list[Request]) -> None:
        nonlocal num_finished
        for request in results:
            alive.pop(request.request_id, None)
            if request.finish_reason is FinishReason.LENGTH:
                num_finished += 1
                assert request.output_token_ids == cores.expected(request)

    for event in range(2_500):
        kind = rng.random()
        if kind < 0.25 and len(alive) < 16:
            prompt = rng.choice(stems)[: rng.randrange(1, 40)] + tuple(
                rng.randrange(cores.vocabulary) for _ in range(3)
            )
            priority = rng.choice(list(PriorityClass))
            added = cores.request(
                f"r{event}", prompt, rng.randrange(1, 12), priority=priority, arrival_seconds=float(event)
            )
            core.add(added)
            alive[added.request_id] = added
        elif kind < 0.32 and alive:
            core.abort(alive.pop(rng.choice(list(alive))).request_id)
        elif kind < 0.38 and alive:
            core.preempt_if_running(rng.choice(list(alive)))
        elif kind < 0.42:
            core.cache.pool.evict_all()
        elif kind < 0.43:
            core.runner.fail_next = True
        elif kind < 0.432:
            for request_id in list(alive):
                core.abort(alive.pop(request_id).request_id)
            assert core.cache.cold is not None
            num_loaded += core.cache.cold.loaded_blocks
            core.close()
            core = cores.open()
        core.scheduler.check()
        settle(core.step().finished)
    deadline = time.monotonic() + 20
    while core.has_work and time.monotonic() < deadline:
        settle(core.step().finished)
    assert not core.has_work, core.scheduler
    cold = core.cache.cold
    assert cold is not None
    num_loaded += cold.loaded_blocks
    core.close()
    core.cache.pool.evict_all()
    core.scheduler.check()
    assert core.cache.pool.num_used == 0 and cold.num_loading_blocks == 0
    assert num_finished > 50 and num_loaded > 20, (num_finished, num_loaded)
    assert cold.cost.decisions[GateDecision.LOAD] > 0
