"""Closed loop of mixed prompts: end-to-end latency and busy ratio beside transformers' static batching.

python ops/bench/latency.py --clients 16,32,64 --rounds 2 --out out/bench

Each of N clients sends its next prompt when the last one is answered, `--rounds` in all. Static batching takes all that
wait. Both see the same prompts, one after the other at each number of clients. The first tokens of both must agree, or
nothing is printed. On two cores of its own some minutes, most of them for 64 and static batching (expected, not timed).

What does not end within `--limit` seconds is given up and named: then there is no verdict, and the exit code is 2. It
is 1 when a goal is missed. So a run ends, whatever the machine does, after the limit for every line of the table.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# this file must not hide the package of the same name: its folder goes to the end of the search path
HERE = str(Path(__file__).parent)
sys.path = [entry for entry in sys.path if entry != HERE] + [str(Path(__file__).parents[2]), HERE]
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from percentiles import percentile  # noqa: E402 (the path is set above)
from static_batching import Asked, StaticBatching  # noqa: E402
from workloads import corpus  # noqa: E402

from engine.api import GenerateRequest  # noqa: E402
from engine.checkpoint.bundled import bundled_model_path  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.engine import Engine  # noqa: E402
from engine.model_engine import load_engine  # noqa: E402
from engine.sampling_params import SamplingParams  # noqa: E402

LEAST_AGREEMENT = 0.8
"""Of the first tokens: bf16 sums depend on who shares a batch, so not all are the same."""
MOST_GROWTH = 0.5
"""Goal: how much p95 grows from the fewest clients to the most, against static batching."""
WARM_UP_SECONDS = 600
Ask = Callable[[str, Asked], Awaitable[list[int]]]


def mixed(tokens: list[int], count: int, seed: str, *, longest: int, longest_answer: int) -> list[Asked]:
    """Three quarters short (30 tokens to a quarter of the longest), one quarter long (half the longest and more)."""
    rng, prompts = random.Random(seed), []
    for number in range(count):
        length = rng.randint(longest // 2, longest) if number % 4 == 3 else rng.randint(30, max(30, longest // 4))
        start = rng.randrange(len(tokens) - length)
        prompts.append(Asked(tuple(tokens[start : start + length]), rng.randint(8, longest_answer)))
    return prompts


@dataclass(slots=True)
class Measured:
    """One way at one number of clients. `busy`: of ours the share of time in steps, of static batching the share of
    token positions that somebody asked for."""

    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)
    gave_up: bool = False

    def figures(self) -> dict[str, Any]:
        return {
            "p50": percentile(self.seconds, 50),
            "p95": percentile(self.seconds, 95),
            "output_tokens_per_second": statistics.median(self.rates),
            "busy": statistics.fmean(self.busy),
            "answers": len(self.seconds),
        }


async def closed_loop(ask: Ask, prompts: list[Asked], num_clients: int, into: Measured) -> None:
    """Every answer's length is checked."""
    left, first = iter(enumerate(prompts)), [0] * len(prompts)

    async def client() -> None:
        for number, asked in left:
            began = time.perf_counter()
            tokens = await ask(f"{num_clients}-{number}", asked)
            into.seconds.append(time.perf_counter() - began)
            assert len(tokens) == asked.num_out, "an answer has the wrong length"
            first[number] = tokens[0]

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(client())
    into.rates.append(sum(asked.num_out for asked in prompts) / (time.perf_counter() - began))
    into.first_tokens += first


class Ours:
    name = "v4flash"

    def __init__(self, engine: Engine) -> None:
        self._engine, self._run = engine, 0

    async def run(self, prompts: list[Asked], num_clients: int, limit_seconds: float, into: Measured) -> None:
        self._run += 1
        before, began = self._engine.stats().busy_seconds_total, time.perf_counter()
        async with asyncio.timeout(limit_seconds):
            await closed_loop(self._ask, prompts, num_clients, into)
        into.busy.append((self._engine.stats().busy_seconds_total - before) / (time.perf_counter() - began))

    async def _ask(self, name: str, asked: Asked) -> list[int]:
        params = SamplingParams(max_tokens=asked.num_out, temperature=0, ignore_eos=True)
        request = GenerateRequest(f"{self._run}-{name}", asked.tokens, params, operation="/v1/completions")
        return [token async for delta in self._engine.generate(request) for token in delta.token_ids]


class Static:
    name = "static batching"

    def __init__(self, batching: StaticBatching) -> None:
        self._batching = batching

    async def run(self, prompts: list[Asked], num_clients: int, limit_seconds: float, into: Measured) -> None:
        batching = self._batching
        batching.num_wanted = batching.num_computed = 0
        batching.deadline = time.perf_counter() + limit_seconds
        server = asyncio.create_task(batching.serve())
        try:
            await closed_loop(lambda _, asked: batching.ask(asked), prompts, num_clients, into)
        except* TimeoutError:
            raise TimeoutError from None
        finally:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)
        into.busy.append(batching.num_wanted / batching.num_computed)


async def measure(options: argparse.Namespace) -> dict[str, dict[int, Measured]]:
    config = EngineConfig(
        num_blocks=4096, max_num_seqs=max(options.clients), max_num_batched_tokens=1024, enable_prefix_caching=False
    )
    engine = load_engine(bundled_model_path(), config, dtype="bf16")
    await engine.start()
    tokens = corpus(engine.encode_text)
    ways = [Ours(engine), Static(StaticBatching())]
    sizes = {"longest": options.longest_prompt, "longest_answer": options.longest_answer}
    for way in ways:
        await way.run(mixed(tokens, 4, "warm", longest=120, longest_answer=8), 4, WARM_UP_SECONDS, Measured())
    measured = {way.name: {count: Measured() for count in options.clients} for way in ways}
    for repetition in range(options.repetitions):
        for count in options.clients:
            prompts = mixed(tokens, count * options.rounds, f"{count} {repetition}", **sizes)
            for way in ways if repetition % 2 == 0 else ways[::-1]:
                began, into = time.perf_counter(), measured[way.name][count]
                if into.gave_up:
                    continue
                try:
                    await way.run(prompts, count, options.limit, into)
                except TimeoutError:
                    into.gave_up = True
                seconds = time.perf_counter() - began
                print(f"  {way.name}, {count} clients: {seconds:.0f} s", file=sys.stderr, flush=True)
    await engine.close()
    return measured


def agreement(ours: Measured, static: Measured) -> float:
    pairs = list(zip(ours.first_tokens, static.first_tokens, strict=False))
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else 1.0


def verdict(rows: dict[str, dict[int, dict[str, Any]]], few: int, many: int) -> tuple[dict[str, float], list[str]]:
    """How p95 grows and what throughput becomes, and the goals that are missed. Only of ways that ended."""
    growth = {f"p95 growth, {name}": row[many]["p95"] / row[few]["p95"] for name, row in rows.items()}
    ours, static = growth.values()
    gain = rows[Ours.name][many]["output_tokens_per_second"] / rows[Ours.name][few]["output_tokens_per_second"]
    missed = []
    if ours > MOST_GROWTH * static:
        missed.append(f"p95({many}) / p95({few}) is {ours:.2f}, more than {MOST_GROWTH} of {static:.2f}")
    if gain < 1:
        missed.append(f"throughput at {many} clients is {gain:.2f} of that at {few}")
    return growth | {"throughput": gain}, missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="16,32,64", type=lambda text: sorted(int(x) for x in text.split(",")))
    parser.add_argument("--rounds", type=int, default=2, help="prompts of each client")
    parser.add_argument("--longest-prompt", type=int, default=400)
    parser.add_argument("--longest-answer", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=1, help="with other prompts, and the other way first")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one way at one number of clients")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    measured = asyncio.run(measure(options))
    ours, static = measured.values()
    for count in options.clients:
        if (same := agreement(ours[count], static[count])) < LEAST_AGREEMENT:
            raise SystemExit(f"{count} clients: only {same:.2f} of the first tokens agree: no figures")
    rows = {name: {n: m.figures() for n, m in row.items() if not m.gave_up} for name, row in measured.items()}
    print("| | clients | p50 s | p95 s | output tokens/s | busy |\n|---|---|---|---|---|---|")
    for count in options.clients:
        for name, row in rows.items():
            cells = f"not within {options.limit:.0f} s | | | "
            if (cell := row.get(count)) is not None:
                cells = f"{cell['p50']:.2f} | {cell['p95']:.2f} | {cell['output_tokens_per_second']:.0f} | "
                cells += f"{cell['busy']:.0%}"
            print(f"| {name} | {count} | {cells} |")
    few, many = options.clients[0], options.clients[-1]
    complete = all(row.keys() >= {few, many} for row in rows.values())
    ratios, missed = verdict(rows, few, many) if complete else ({}, [])
    print("; ".join(f"{what} {value:.2f}" for what, value in ratios.items()))
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[2]:.1f}"
    report = {"machine": machine, "command": sys.argv, **rows, "ratios": ratios, "missed": missed}
    (options.out / "latency.json").write_text(json.dumps(report, indent=1))
    if not complete:
        print("NO VERDICT: not everything ended in time")
        sys.exit(2)
    print(f"MISSED: {'; '.join(missed)}" if missed else "HELD")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
