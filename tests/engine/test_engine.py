"""The engine thread and its facade: whatever ends the thread, no reader waits for ever and none is told a wrong end."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from engine.api import FinishReason, GenerateRequest, ModelInfo
from engine.batch import Layers, SampledRow, ScheduledBatch
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.engine import Engine
from engine.errors import EngineDeadError, EngineError, ModelLoadError
from engine.loaded_model import LoadedModel
from engine.sampling_params import SamplingParams
from engine.scripted_answer import ByteTokenizer

LETTER = 65


class GatedTokenizer(ByteTokenizer):
    eos_token_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("ascii")


class GatedRunner:
    """Answers with one letter; a step starts when the gate is open, and may be made to fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.batch = ScheduledBatch()

    def segments(self, batch: ScheduledBatch) -> list[Layers]:
        return [(0, 1)]

    def launch(self, batch: ScheduledBatch, layers: Layers) -> None:
        self.gate.wait(10)
        if self.failure is not None:
            raise self.failure
        self.batch = batch

    def sample(self) -> None:
        pass

    def collect(self) -> list[SampledRow]:
        return [SampledRow(row.request_id, LETTER) for row in self.batch.rows if row.sample]


def loader(runner: GatedRunner, *, before: Callable[[], object] = lambda: None) -> Callable[[], LoadedModel]:
    config = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=4, max_model_len=64)

    def load() -> LoadedModel:
        before()
        tokenizer = GatedTokenizer()
        core = EngineCore(config, runner, check=True)
        return LoadedModel(ModelInfo("m", 64, 256), tokenizer, core, "digest", "layout")  # type: ignore[arg-type]

    return load


async def answer(engine: Engine, *, max_tokens: int = 8, name: str = "r", **fields: object) -> tuple[str, FinishReason]:
    text, reason = "", None
    params = SamplingParams(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    async for delta in engine.generate(GenerateRequest(name, (1, 2, 3), params)):
        text, reason = text + delta.text, delta.finish_reason
    assert reason is not None
    return text, reason


async def test_a_tenant_never_reads_a_prefix_of_another_one() -> None:
    """The same prompt again is read from the cache by the tenant that brought it, and by nobody else."""
    engine = Engine(loader(GatedRunner()))
    await engine.start()

    async def cached_tokens(tenant: str, number: int) -> int:
        request = GenerateRequest(f"{tenant}-{number}", tuple(range(20)), SamplingParams(max_tokens=1), tenant=tenant)
        usages = [delta.usage async for delta in engine.generate(request) if delta.usage is not None]
        return usages[-1].cached_tokens

    assert await cached_tokens("acme", 1) == 0
    assert await cached_tokens("acme", 2) == 16
    assert await cached_tokens("other", 1) == 0
    assert await cached_tokens("", 1) == 0
    assert await cached_tokens("other", 2) == 16
    await engine.close()


async def test_a_started_engine_answers_and_ends_its_thread() -> None:
    """The way through inbox, thread and back; after `close` nobody is served."""
    engine = Engine(loader(GatedRunner()))
    await engine.start()
    assert await answer(engine) == ("A" * 8, FinishReason.LENGTH)
    steps = [event for event in engine.flight.events() if event["kind"] == "step"]
    assert [(step["rows"], step["requests"], step["ended"]) for step in steps] == [(1, ["r#0"], 0)] * 7 + [
        (1, ["r#0"], 1)
    ]
    assert await answer(engine, stop=("AAA",)) == ("", FinishReason.STOP)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineDeadError):
        await answer(engine)


async def test_a_reader_who_leaves_takes_the_request_along() -> None:
    """What nobody reads any more is in no later step: its slot and its blocks are for others."""
    runner = GatedRunner()
    engine = Engine(loader(runner))
    await engine.start()
    stream = engine.generate(GenerateRequest("left", (1, 2, 3), SamplingParams(max_tokens=60)))
    await anext(stream)
    runner.gate.clear()  # it cannot run to its end meanwhile
    await stream.aclose()  # type: ignore[attr-defined]
    asking = asyncio.create_task(answer(engine, name="next"))
    await asyncio.sleep(0)
    runner.gate.set()
    assert await asking == ("A" * 8, FinishReason.LENGTH)
    steps = [event["requests"] for event in engine.flight.events() if event["kind"] == "step"]
    assert ["next#0"] in steps
    assert not any({"left#0", "next#0"} <= set(requests) for requests in steps)
    await engine.close()


async def test_an_engine_closed_while_it_loads_never_becomes_ready() -> None:
    """Otherwise it would take prompts with no thread behind it, and they would wait for ever."""
    release = threading.Event()
    engine = Engine(loader(GatedRunner(), before=lambda: release.wait(10)))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    await engine.close()
    release.set()
    with pytest.raises(EngineDeadError):
        await starting
    assert not engine.health.ready
    with pytest.raises(EngineDeadError):
        await answer(engine)


async def test_a_load_that_fails_says_why() -> None:
    """In what `start` raises and in what /health shows."""

    def load() -> LoadedModel:
        raise ModelLoadError("tensor blk.3 is missing")

    engine = Engine(load)
    with pytest.raises(ModelLoadError):
        await engine.start()
    assert not engine.health.ready and "blk.3" in engine.health.reason
    await engine.close()


async def test_a_dead_engine_thread_is_no_fault_of_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    """Their readers get EngineDeadError, on which a worker leaves the record for another; new ones get it at once. The
    log says where it broke."""
    runner = GatedRunner()
    runner.gate.clear()
    loaded = loader(runner)()
    engine = Engine(lambda: loaded)
    await engine.start()
    waiting = [asyncio.create_task(answer(engine, name=name)) for name in ("a", "b")]
    await asyncio.sleep(0)

    def broken(*_: object) -> None:
        raise AssertionError("bookkeeping")

    loaded.core.scheduler.update = broken  # type: ignore[method-assign]
    runner.gate.set()
    for task in waiting:
        with pytest.raises(EngineDeadError):
            await task
    assert not engine.health.ready
    with pytest.raises(EngineDeadError):
        await answer(engine)
    await engine.close()
    assert "in broken" in caplog.text


async def test_closing_ends_running_streams_as_dead_and_not_as_failed() -> None:
    """A request cut off by a close has no terminal error: it may run elsewhere."""
    runner = GatedRunner()
    engine = Engine(loader(runner))
    await engine.start()
    runner.gate.clear()
    task = asyncio.create_task(answer(engine))
    await asyncio.sleep(0)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    runner.gate.set()
    with pytest.raises(EngineDeadError):
        await task
    await closing


async def test_a_request_whose_step_fails_alone_gets_an_error_and_the_engine_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One bad request fails alone, with a message that holds no text of the exception: that is in the log."""
    runner = GatedRunner()
    engine = Engine(loader(runner))
    await engine.start()
    runner.failure = RuntimeError("secret")
    with pytest.raises(EngineError) as caught:
        await answer(engine)
    assert not isinstance(caught.value, EngineDeadError) and "secret" not in str(caught.value)
    assert "RuntimeError: secret" in caplog.text
    runner.failure = None
    assert await answer(engine) == ("A" * 8, FinishReason.LENGTH)
    await engine.close()
