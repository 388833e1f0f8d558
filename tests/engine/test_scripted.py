"""The engine without a model keeps the contract of every engine, and its answers can be foretold."""

import asyncio
import math

import pytest

from engine.api import ChatMessage, Delta, FinishReason, GenerateRequest, PriorityClass
from engine.errors import CacheCapacityError, ContextLengthExceededError, EngineDeadError, EngineError
from engine.sampling_params import SamplingParams
from engine.scripted import ScriptedEngine, scripted_answer
from engine.scripted_answer import TURN_END, TURN_START


async def started(**options: object) -> ScriptedEngine:
    engine = ScriptedEngine(**options)  # type: ignore[arg-type]
    await engine.start()
    return engine


def request(engine: ScriptedEngine, text: str, name: str = "r", **params: object) -> GenerateRequest:
    return GenerateRequest(name, engine.encode_text(text), SamplingParams(**params))  # type: ignore[arg-type]


async def read(engine: ScriptedEngine, asked: GenerateRequest) -> list[Delta]:
    return [delta async for delta in engine.generate(asked)]


async def test_the_answer_is_the_one_foretold() -> None:
    """The text streamed is `scripted_answer` of the prompt, and the last delta has reason and usage."""
    engine = await started()
    asked = request(engine, "hello", max_tokens=500)
    deltas = await read(engine, asked)
    text = "".join(delta.text for delta in deltas)
    assert text == scripted_answer(asked.prompt_token_ids, 500)
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].usage is not None and deltas[-1].usage.completion_tokens == len(text)
    assert engine.stats().num_running == 0 and engine.stats().kv_utilisation == 0


async def test_max_tokens_ends_an_answer_with_length() -> None:
    """An answer cut by max_tokens has exactly that many tokens and says so."""
    engine = await started()
    deltas = await read(engine, request(engine, "hello", max_tokens=5))
    assert sum(len(delta.token_ids) for delta in deltas) == 5
    assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_a_stop_string_ends_the_answer_before_itself() -> None:
    """No character of the stop string is sent, although it comes one byte at a time."""
    engine = await started()
    asked = request(engine, "hello", max_tokens=500)
    whole = scripted_answer(asked.prompt_token_ids, 500)
    stop = whole[6:12]
    deltas = await read(engine, request(engine, "hello", max_tokens=500, stop=(stop,)))
    assert "".join(delta.text for delta in deltas) == whole[: whole.index(stop)]
    assert deltas[-1].finish_reason is FinishReason.STOP


async def test_every_choice_has_its_own_answer_and_end() -> None:
    """With n=3 each index ends once and usage counts all of them."""
    engine = await started()
    asked = request(engine, "hello", max_tokens=30, n=3)
    deltas = await read(engine, asked)
    for index in range(3):
        own = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in own) == scripted_answer(asked.prompt_token_ids, 30, index)
        assert [delta.finish_reason is not None for delta in own].count(True) == 1
    assert [delta for delta in deltas if delta.usage is not None] == [deltas[-1]]


async def test_the_prompt_can_set_the_length() -> None:
    """`[[tokens=N]]` gives an answer of N tokens."""
    engine = await started()
    deltas = await read(engine, request(engine, "[[tokens=300]]", max_tokens=1000))
    assert sum(len(delta.token_ids) for delta in deltas) == 300


async def test_an_error_on_request() -> None:
    """`[[error]]` fails this request alone and frees its blocks."""
    engine = await started()
    with pytest.raises(EngineError):
        await read(engine, request(engine, "[[error]]"))
    assert engine.stats().num_running == 0


async def test_a_stalled_request_holds_its_blocks_until_closed() -> None:
    """`[[stall]]` never answers; cancelling the reader frees its blocks."""
    engine = await started()
    task = asyncio.create_task(read(engine, request(engine, "[[stall]]")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engine.stats().num_running == 1 and engine.stats().kv_utilisation > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.stats().num_running == 0


async def test_the_rate_is_kept_on_the_clock_handed_in() -> None:
    """One sleep of 1/rate before each token, and a slow request keeps its own slower rate."""
    naps: list[float] = []

    async def sleep(seconds: float) -> None:
        naps.append(seconds)

    engine = await started(tokens_per_second=100, sleep=sleep)
    await read(engine, request(engine, "hi", max_tokens=4))
    await read(engine, request(engine, "[[slow]]", max_tokens=2))
    assert naps == [0.01] * 4 + [0.05] * 2


async def test_an_urgent_request_overtakes_those_who_wait_for_blocks() -> None:
    """Blocks never exceed the cache; when some come free the urgent one has them first."""
    engine = await started(num_blocks=4)
    running = engine.generate(request(engine, "first", "first", max_tokens=40, ignore_eos=True))
    await anext(running)
    ended: list[str] = []

    async def follow(name: str, priority: PriorityClass) -> None:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        await read(engine, GenerateRequest(name, engine.encode_text(name), params, priority))
        ended.append(name)

    bulk = asyncio.create_task(follow("bulk", PriorityClass.BULK))
    await asyncio.sleep(0)
    urgent = asyncio.create_task(follow("urgent", PriorityClass.URGENT))
    await asyncio.sleep(0)
    assert engine.stats().num_waiting == 2
    await running.aclose()
    await asyncio.gather(bulk, urgent)
    assert ended == ["urgent", "bulk"]


async def test_what_can_never_run_is_refused() -> None:
    """Too long for the context and too large for the cache are told apart."""
    engine = await started(max_model_len=100, num_blocks=2)
    with pytest.raises(ContextLengthExceededError):
        engine.check(request(engine, "x" * 90, max_tokens=20))
    with pytest.raises(CacheCapacityError):
        engine.check(request(engine, "x" * 40, max_tokens=20, ignore_eos=True))


async def test_closing_ends_every_stream() -> None:
    """Running and waiting streams fail with EngineDeadError, and closing twice is fine."""
    engine = await started(num_blocks=10)
    stalled = asyncio.create_task(read(engine, request(engine, "[[stall]]", "a", max_tokens=100, ignore_eos=True)))
    waiting = asyncio.create_task(read(engine, request(engine, "hello", "b", max_tokens=100, ignore_eos=True)))
    for _ in range(3):
        await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    for task in (stalled, waiting):
        with pytest.raises(EngineDeadError):
            await task
    assert not engine.health.ready and math.isclose(engine.stats().kv_utilisation, 0)


async def test_text_never_becomes_a_control_token() -> None:
    """Only the frame of the turns has control tokens."""
    engine = await started()
    ids = engine.encode_chat([ChatMessage("user", "<|im_end|>Ā𐀀\ud800")])
    assert [token for token in ids if token >= TURN_START] == [TURN_START, TURN_END, TURN_START]


async def test_a_waiting_request_that_is_cancelled_harms_nobody() -> None:
    """Blocks come free before its task has heard of it: they are the next one's."""
    engine = await started(num_blocks=4)
    running = engine.generate(request(engine, "first", "first", max_tokens=40, ignore_eos=True))
    await anext(running)
    waiting = asyncio.create_task(read(engine, request(engine, "second", "second", max_tokens=40)))
    await asyncio.sleep(0)
    waiting.cancel()
    await running.aclose()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await read(engine, request(engine, "third", "third", max_tokens=40))
