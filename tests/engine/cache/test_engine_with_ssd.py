"""The engine's thread beside loads: it rests, it is woken, it gives the directory back."""

import asyncio
import threading
import time
from typing import Any

import pytest

from engine.api import GenerateRequest, ModelInfo, Usage
from engine.cache.cold_admission import ColdAdmission
from engine.core import EngineCore
from engine.engine import Engine
from engine.loaded_model import LoadedModel
from engine.sampling_params import SamplingParams
from engine.scripted import ByteTokenizer

PROMPT = tuple(range(41))
WAIT = 10.0


class Tokens(ByteTokenizer):
    eos_token_ids: frozenset[int] = frozenset()


async def usage_of(engine: Engine, name: str, prompt: tuple[int, ...] = PROMPT) -> Usage:
    params = SamplingParams(max_tokens=4, temperature=0)
    deltas = [delta async for delta in engine.generate(GenerateRequest(name, prompt, params))]
    assert deltas[-1].usage is not None
    return deltas[-1].usage


async def started(core: EngineCore) -> Engine:
    engine = Engine(lambda: LoadedModel(ModelInfo("tokens", 96, 97), Tokens(), core, "digest", "layout"))  # type: ignore[arg-type]
    await engine.start()
    return engine


async def test_the_thread_rests_while_a_load_is_under_way_and_wakes_when_it_lands(cores: Any) -> None:
    """It does not spin, needs no deadline to go on, and the usage says that the tokens came from the SSD."""
    core = cores.open(admission=ColdAdmission.FIRST, num_write_slots=32, has_deadline=False)
    engine = await started(core)
    assert (await usage_of(engine, "first")).cached_tokens == 0
    await asyncio.to_thread(until, lambda: core.cache.cold.transfers.num_unwritten == 0)
    opened, began = threading.Event(), threading.Event()

    def wait(data: memoryview) -> None:
        began.set()
        assert opened.wait(WAIT)

    engine._inbox.put(lambda core: core.cache.pool.evict_all())
    cores.disk.on_read = wait
    steps: list[float] = []
    step = core.step
    core.step = lambda *args: steps.append(time.monotonic()) or step(*args)
    asking = asyncio.create_task(usage_of(engine, "again"))
    assert await asyncio.to_thread(began.wait, WAIT)
    num_steps = len(steps)
    for _ in range(20):  # a thread that spins would step hundreds of times meanwhile
        await asyncio.to_thread(lambda: None)
    assert len(steps) - num_steps <= 2
    opened.set()
    usage = await asyncio.wait_for(asking, WAIT)
    assert (usage.cached_tokens, usage.loaded_tokens) == (40, 40)
    await engine.close()
    assert not cores.disk.locked


async def test_the_thread_rests_while_a_long_sequence_waits_for_the_disk_and_wakes_when_it_has_written(
    cores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that is larger than the memory goes on when its oldest blocks are on the SSD, not before, and not
    only when its rest is over."""
    monkeypatch.setattr("engine.core.LANE_REST_SECONDS", 1_000.0)
    core = cores.open(max_model_len=1_000)
    engine = await started(core)
    opened, began = threading.Event(), threading.Event()

    def wait(data: memoryview) -> None:
        began.set()
        assert opened.wait(WAIT)

    cores.disk.on_write = wait
    num_steps = [0]
    step = core.step

    def counted(*args: Any) -> Any:
        num_steps[0] += 1
        return step(*args)

    core.step = counted
    asking = asyncio.create_task(usage_of(engine, "long", tuple(index % 97 for index in range(160))))
    assert await asyncio.to_thread(began.wait, WAIT)
    await asyncio.to_thread(until, lambda: core._did_nothing)
    before = num_steps[0]
    for _ in range(20):  # a thread that spins would step hundreds of times meanwhile
        await asyncio.to_thread(lambda: None)
    assert num_steps[0] - before <= 2 and not asking.done()
    opened.set()
    assert (await asyncio.wait_for(asking, WAIT)).completion_tokens == 4
    assert core.stats().cold.streamed_bytes_total > 0
    await engine.close()


def until(condition: Any) -> None:
    turn = threading.Event()
    for _ in range(int(WAIT * 1000)):
        if condition():
            return
        turn.wait(0.001)
    raise AssertionError("it did not come")
