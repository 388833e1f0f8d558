"""Closed loop of mixed prompts: end-to-end latency and busy ratio beside transformers' static batching.

python ops/bench/latency.py --concurrency 16,32,64 --requests 64,64,128 --out out/bench

Each of N clients sends its next prompt when the last one is answered. Static batching takes all that wait, pads them
on the left, and answers all when the longest answer is complete. Both ways see the same prompts, in turn.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# this file must not hide the package of the same name: its folder goes to the end of the search path
HERE = str(Path(__file__).parent)
sys.path = [entry for entry in sys.path if entry != HERE] + [str(Path(__file__).parents[2]), HERE]
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402
from percentiles import percentiles  # noqa: E402
from workloads import corpus  # noqa: E402

from engine.api import GenerateRequest  # noqa: E402
from engine.checkpoint.bundled import bundled_model_path  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.engine import Engine, load_engine  # noqa: E402
from engine.sampling_params import SamplingParams  # noqa: E402

WEIGHTS = Path(__file__).parents[2] / ".cache" / "peers" / "weights" / "hf"


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and how long its answer is."""

    tokens: tuple[int, ...]
    num_out: int


def mixed(tokens: list[int], count: int, seed: str) -> list[Asked]:
    """Three quarters short (30-150 in), one quarter long (300-600 in), 8-96 tokens out."""
    rng, prompts = random.Random(seed), []
    for number in range(count):
        length = rng.randint(300, 600) if number % 4 == 3 else rng.randint(30, 150)
        start = rng.randrange(len(tokens) - length)
        prompts.append(Asked(tuple(tokens[start : start + length]), rng.randint(8, 96)))
    return prompts


async def closed_loop(ask: Callable[[str, Asked], Awaitable[int]], prompts: list[Asked], clients: int) -> list[float]:
    """Seconds of each answer; every answer's length is checked."""
    left, seconds = iter(enumerate(prompts)), []

    async def client() -> None:
        for number, asked in left:
            began = time.perf_counter()
            num_tokens = await ask(f"{clients}-{number}", asked)
            assert num_tokens == asked.num_out, "an answer has the wrong length"
            seconds.append(time.perf_counter() - began)

    await asyncio.gather(*(client() for _ in range(clients)))
    return seconds


class Ours:
    """`Engine.generate`; busy is the share of time in steps."""

    name = "v4flash"

    def __init__(self, engine: Engine) -> None:
        self._engine, self._run = engine, 0

    async def run(self, prompts: list[Asked], clients: int) -> dict[str, float]:
        self._run += 1
        before, began = self._engine.stats().busy_seconds_total, time.perf_counter()
        seconds = await closed_loop(self._ask, prompts, clients)
        elapsed = time.perf_counter() - began
        busy = self._engine.stats().busy_seconds_total - before
        return figures(seconds, prompts, elapsed, busy / elapsed)

    async def _ask(self, name: str, asked: Asked) -> int:
        params = SamplingParams(max_tokens=asked.num_out, temperature=0, ignore_eos=True)
        request = GenerateRequest(f"{self._run}-{name}", asked.tokens, params, operation="/v1/completions")
        return sum([len(delta.token_ids) async for delta in self._engine.generate(request)])


class Static:
    """transformers' generate on all prompts that wait; busy is the share of row-steps that somebody asked for."""

    name = "static batching"

    def __init__(self, dtype: torch.dtype) -> None:
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            WEIGHTS, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        ).eval()
        self._waiting: list[tuple[Asked, asyncio.Future[int]]] = []
        self._wanted = self._computed = 0

    async def run(self, prompts: list[Asked], clients: int) -> dict[str, float]:
        self._wanted = self._computed = 0
        began = time.perf_counter()
        server = asyncio.create_task(self._serve())
        seconds = await closed_loop(self._ask, prompts, clients)
        elapsed = time.perf_counter() - began
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
        return figures(seconds, prompts, elapsed, self._wanted / self._computed)

    async def _ask(self, name: str, asked: Asked) -> int:
        answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, answered))
        return await answered

    async def _serve(self) -> None:
        while True:
            await asyncio.sleep(0)  # the clients that were just answered ask again first
            batch, self._waiting = self._waiting, []
            if not batch:
                await asyncio.sleep(0.001)
                continue
            await asyncio.to_thread(self._generate, [asked for asked, _ in batch])
            for asked, answered in batch:
                answered.set_result(asked.num_out)

    @torch.inference_mode()
    def _generate(self, batch: list[Asked]) -> None:
        width, steps = max(len(a.tokens) for a in batch), max(a.num_out for a in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, asked in enumerate(batch):
            ids[row, width - len(asked.tokens) :] = torch.tensor(asked.tokens)
            mask[row, width - len(asked.tokens) :] = 1
        self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=steps,
            max_new_tokens=steps,
            pad_token_id=0,
            eos_token_id=None,
        )
        self._wanted += sum(len(asked.tokens) + asked.num_out for asked in batch)
        self._computed += len(batch) * (width + steps)


def figures(seconds: list[float], prompts: list[Asked], elapsed: float, busy: float) -> dict[str, float]:
    p50, p95, _ = percentiles(seconds).values()
    num_out = sum(asked.num_out for asked in prompts)
    return {"p50": p50, "p95": p95, "output_tokens_per_second": num_out / elapsed, "busy": busy}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = EngineConfig(num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=1024, enable_prefix_caching=False)
    engine = load_engine(bundled_model_path(), config, dtype="bf16")
    await engine.start()
    tokens = corpus(engine.encode_text)
    ways = [Ours(engine), Static(torch.bfloat16)]
    for way in ways:
        await way.run(mixed(tokens, 4, "warm"), 4)
    results: dict[str, dict[str, Any]] = {way.name: {} for way in ways}
    for clients, count in zip(options.concurrency, options.requests, strict=True):
        prompts = mixed(tokens, count, f"{clients}")
        for way in ways:
            results[way.name][str(clients)] = result = await way.run(prompts, clients)
            print(
                f"{way.name:16}{clients:4} clients: p50 {result['p50']:6.2f} s, p95 {result['p95']:6.2f} s, "
                f"{result['output_tokens_per_second']:5.0f} output tokens/s, busy {100 * result['busy']:3.0f} %",
                flush=True,
            )
    await engine.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="16,32,64", type=lambda text: [int(x) for x in text.split(",")])
    parser.add_argument("--requests", default="64,64,128", type=lambda text: [int(x) for x in text.split(",")])
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = asyncio.run(measure(options))
    low, high = str(min(options.concurrency)), str(max(options.concurrency))
    for name, result in results.items():
        growth = result[high]["p95"] / result[low]["p95"]
        print(f"{name}: p95({high}) / p95({low}) = {growth:.2f}")
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    report = {"machine": machine, "command": sys.argv, **results}
    (options.out / "latency.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
