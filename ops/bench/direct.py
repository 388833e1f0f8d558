"""The engine of a worker, called directly in a process of its own: what the way through Kafka is measured against."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from engine.api import Delta, GenerateRequest
from engine.sampling_params import SamplingParams
from worker.serve import build_engine
from worker.settings import Settings


@dataclass(frozen=True, slots=True)
class DirectAnswer:
    """One answer; `first_token_seconds` from the start of the batch."""

    text: str
    num_prompt_tokens: int
    num_tokens: int
    first_token_seconds: float


def serve_direct(pipe: Any, settings: dict[str, Any]) -> None:
    """Answers batches of (texts, number of output tokens) from the pipe with (answers, seconds, CPU seconds)."""
    asyncio.run(_serve(pipe, Settings(**settings)))


async def _serve(pipe: Any, settings: Settings) -> None:
    engine = build_engine(settings)
    await engine.start()
    number = 0
    try:
        while (task := await asyncio.to_thread(pipe.recv)) is not None:
            texts, num_out = task
            number += 1
            began, cpu = time.perf_counter(), time.process_time()
            requests = [_answer(engine, f"{number}-{i}", text, num_out, began) for i, text in enumerate(texts)]
            answers = await asyncio.gather(*requests)
            pipe.send((answers, time.perf_counter() - began, time.process_time() - cpu))
    finally:
        await engine.close()


async def _answer(engine: Any, request_id: str, text: str, num_out: int, began: float) -> DirectAnswer:
    tokens = engine.encode_text(text)
    params = SamplingParams(max_tokens=num_out, temperature=0, ignore_eos=True)
    request = GenerateRequest(request_id, tokens, params, operation="/v1/completions", arrival_seconds=time.monotonic())
    first: float | None = None
    deltas: list[Delta] = []
    async for delta in engine.generate(request):
        first = time.perf_counter() - began if first is None else first
        deltas.append(delta)
    num_tokens = sum(len(delta.token_ids) for delta in deltas)
    return DirectAnswer("".join(delta.text for delta in deltas), len(tokens), num_tokens, first or 0.0)
