"""Urgent prompts under bulk: time to first token with step-level preemption alone and with segment boundaries.

python ops/bench/urgent.py --arrivals 100,40 --shares 0.05,0.01 --rounds 1 --out out/bench          (some minutes)
python ops/bench/urgent.py --arrivals 500,100 --kafka                                               (the long form)

Bulk documents of 1,500 tokens keep the engine full; urgent prompts of 50 tokens arrive by Poisson at a share of its
token capacity. Refuses to print when too few arrivals met a bulk chunk of at least 1,024 tokens in flight.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

# this file must not hide the package of the same name: its folder goes to the end of the search path
HERE = str(Path(__file__).parent)
sys.path = [entry for entry in sys.path if entry != HERE] + [str(Path(__file__).parents[2]), HERE]
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from percentiles import percentile  # noqa: E402
from recording import RecordingRunner, chunk_in_flight, work_between  # noqa: E402
from workloads import corpus  # noqa: E402

from engine.api import GenerateRequest, PriorityClass  # noqa: E402
from engine.checkpoint.bundled import bundled_model_path  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.engine import Engine  # noqa: E402
from engine.loaded_model import LoadedModel  # noqa: E402
from engine.loading import load_model_and_core  # noqa: E402
from engine.sampling_params import SamplingParams  # noqa: E402

BULK_TOKENS, BULK_OUT, URGENT_TOKENS, URGENT_OUT = 1500, 8, 50, 8
LEAST_CHUNK, LEAST_SHARE = 1024, 0.9
CONFIG = EngineConfig(
    num_blocks=2048,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    prefill_chunk_size=2048,
    urgent_reserved_seqs=2,
    urgent_reserved_blocks=64,
)
NUM_BULK = 12
VARIANTS = {"step": False, "segment": True}


class Prompts:
    """Other tokens for every prompt, so nothing is found in the prefix cache."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens, self._rng = tokens, random.Random(5)

    def cut(self, length: int) -> tuple[int, ...]:
        start = self._rng.randrange(len(self._tokens) - length)
        return tuple(self._tokens[start : start + length])


class DirectAsker:
    """Asks an engine in this process."""

    def __init__(self, engine: Engine, prompts: Prompts) -> None:
        self._engine, self._prompts = engine, prompts

    async def ask(self, name: str, priority: PriorityClass, length: int, num_out: int) -> list[float]:
        """Times at which tokens came."""
        params = SamplingParams(max_tokens=num_out, temperature=0, ignore_eos=True)
        request = GenerateRequest(name, self._prompts.cut(length), params, priority, operation="/v1/completions")
        times: list[float] = []
        async for delta in self._engine.generate(request):
            times += [time.monotonic()] * len(delta.token_ids)
        return times


async def phase(
    ask: Callable[..., Any], name: str, *, bulk: bool, rate: float, arrivals: int, seconds: float = 0.0
) -> dict[str, Any]:
    """Bulk in a closed loop if asked for, urgent prompts by Poisson; ends with the last urgent answer, or after so
    many seconds if there are none."""
    rng, stop = random.Random(name), asyncio.Event()
    gaps: list[float] = []
    moments: list[float] = []
    first: list[float] = []

    async def documents(number: int) -> None:
        count = 0
        while not stop.is_set():
            times = await ask(f"bulk-{name}-{number}-{count}", PriorityClass.BULK, BULK_TOKENS, BULK_OUT)
            gaps.extend(b - a for a, b in itertools.pairwise(times))
            count += 1

    async def urgent(number: int) -> None:
        asked = time.monotonic()
        moments.append(asked)
        times = await ask(f"urgent-{name}-{number}", PriorityClass.URGENT, URGENT_TOKENS, URGENT_OUT)
        first.append(times[0] - asked)

    feeders = [asyncio.create_task(documents(number)) for number in range(NUM_BULK if bulk else 0)]
    await asyncio.sleep(3.0 if bulk else 0.0)  # until every slot is taken
    began = time.monotonic()
    asked = []
    for number in range(arrivals):
        await asyncio.sleep(rng.expovariate(rate))
        asked.append(asyncio.create_task(urgent(number)))
    await asyncio.gather(*asked)
    await asyncio.sleep(seconds)
    ended = time.monotonic()
    stop.set()
    during = list(gaps)
    await asyncio.gather(*feeders)  # to their end: the next phase begins with an idle engine
    print(f"  {name}: {len(first)} urgent answers in {ended - began:.0f} s", file=sys.stderr, flush=True)
    return {"began": began, "ended": ended, "first": first, "moments": moments, "gaps": during}


def summary(phases: list[dict[str, Any]], recording: list[Any]) -> dict[str, Any]:
    """Of all rounds of one variant together."""
    work = [work_between(recording, p["began"], p["ended"]) for p in phases]
    seconds = sum(w["seconds"] for w in work)
    met = [chunk_in_flight(recording, moment, LEAST_CHUNK) for p in phases for moment in p["moments"]]
    first = [value for p in phases for value in p["first"]]
    gaps = [value for p in phases for value in p["gaps"]]
    return {
        "arrivals": len(first),
        "first_token_ms": {f"p{q}": 1000 * percentile(first, q) for q in (50, 90, 99)},
        "met_chunk": sum(met) / max(1, len(met)),
        "bulk_gap_ms": {f"p{q}": 1000 * percentile(gaps, q) for q in (50, 99)},
        **{
            key: sum(w[key] * w["seconds"] for w in work) / seconds
            for key in ("bulk_tokens_per_second", "tokens_per_second", "recomputed_share")
        },
    }


def results(
    capacity: float,
    idle: list[dict[str, Any]],
    alone: list[dict[str, Any]],
    runs: dict[str, list[dict[str, Any]]],
    steps: list[Any],
) -> dict[str, Any]:
    """What `report` shows; `capacity` is tokens a second of bulk alone."""
    return {
        "capacity_tokens_per_second": capacity,
        "idle": summary(idle, steps),
        "bulk alone": summary(alone, steps),
        **{label: summary(phases, steps) for label, phases in runs.items()},
    }


def show(label: str, part: dict[str, Any], *, idle: float, alone: float) -> None:
    first, gap = part["first_token_ms"], part["bulk_gap_ms"]
    print(
        f"{label:22}{part['arrivals']:5} arrivals, {100 * part['met_chunk']:4.0f} % met a chunk; first token ms p50 "
        f"{first['p50']:6.0f} p99 {first['p99']:6.0f} ({first['p99'] / idle:4.1f} x idle); bulk tokens/s "
        f"{part['bulk_tokens_per_second']:6.0f} (loss {100 * (1 - part['bulk_tokens_per_second'] / alone):4.1f} %, "
        f"recomputed {100 * part['recomputed_share']:4.1f} %), gap p99 {gap['p99']:5.0f} ms",
        flush=True,
    )


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    loaded = load_model_and_core(
        bundled_model_path(), CONFIG, name=None, dtype=options.dtype, exact_modules=(), few_rows=True, check=False
    )
    recording = RecordingRunner(loaded.core.runner)
    loaded.core.runner = recording
    engine = Engine(lambda: loaded)
    await engine.start()
    ask = DirectAsker(engine, Prompts(corpus(engine.encode_text))).ask
    try:
        return await compare(ask, recording, options, switch=lambda on: switch(loaded, on))
    finally:
        await engine.close()


def arrivals_of(variant: str, arrivals: int) -> int:
    """Of a variant, where segments get so many: step level is so far from the goal that fewer tell it."""
    return max(1, round({"step": 0.2, "idle": 0.4}.get(variant, 1.0) * arrivals))


def switch(loaded: LoadedModel, interrupts: bool) -> None:
    loaded.core.config = loaded.core.scheduler.config = replace(loaded.core.config, enable_interrupts=interrupts)


async def compare(
    ask: Callable[..., Any], recording: RecordingRunner, options: argparse.Namespace, *, switch: Callable[[bool], None]
) -> dict[str, Any]:
    await phase(ask, "warm", bulk=True, rate=2.0, arrivals=2)
    capacity_phase = await phase(ask, "capacity", bulk=True, rate=1.0, arrivals=0, seconds=options.seconds)
    capacity = work_between(recording.steps, capacity_phase["began"], capacity_phase["ended"])["tokens_per_second"]
    idle, alone = [], [capacity_phase]
    runs: dict[str, list[dict[str, Any]]] = {}
    for turn in range(options.rounds):
        for share, arrivals in zip(options.shares, options.arrivals, strict=True):
            rate = share * capacity / (URGENT_TOKENS + URGENT_OUT)
            each = -(-arrivals // options.rounds)
            count = arrivals_of("idle", each)
            idle.append(await phase(ask, f"idle{turn}-{share}", bulk=False, rate=max(rate, 1.0), arrivals=count))
            for variant, interrupts in VARIANTS.items():
                switch(interrupts)
                count = arrivals_of(variant, each)
                run = await phase(ask, f"{variant}{turn}-{share}", bulk=True, rate=rate, arrivals=count)
                runs.setdefault(f"{variant} {100 * share:g} %", []).append(run)
        alone.append(await phase(ask, f"alone{turn}", bulk=True, rate=1.0, arrivals=0, seconds=options.seconds))
    return results(capacity, idle, alone, runs, recording.steps)


def report(way: str, result: dict[str, Any]) -> None:
    idle, alone = result["idle"]["first_token_ms"]["p99"], result["bulk alone"]["bulk_tokens_per_second"]
    poor = {
        label: part["met_chunk"]
        for label, part in result.items()
        if label.startswith(tuple(VARIANTS)) and part["met_chunk"] < LEAST_SHARE
    }
    if poor:
        raise SystemExit(f"{way}: too few arrivals met a chunk of {LEAST_CHUNK} tokens: {poor}")
    print(f"{way}: capacity {result['capacity_tokens_per_second']:.0f} tokens/s")
    for label, part in result.items():
        if isinstance(part, dict):
            show(label, part, idle=idle, alone=alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", default="0.05,0.01", type=lambda text: [float(x) for x in text.split(",")])
    parser.add_argument("--arrivals", default="100,40", type=lambda text: [int(x) for x in text.split(",")])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=15.0, help="of bulk alone, before and after")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32", "int8"])
    parser.add_argument("--cpu-clock", action="store_true", help="for a machine that is not alone: see urgent_cpu.py")
    parser.add_argument(
        "--capacity", type=float, default=1000.0, help="tokens a second, with --kafka: shares are of it"
    )
    parser.add_argument("--kafka", action="store_true", help="through Kafka instead of Engine.generate")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.cpu_clock:
        from urgent_cpu import measure_cpu

        way, result = "EngineCore, on the CPU clock", measure_cpu(options)
    elif options.kafka:
        from urgent_kafka import measure_through_kafka

        way, result = "through Kafka", asyncio.run(measure_through_kafka(options))
    else:
        way, result = "Engine.generate", asyncio.run(measure(options))
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    file = options.out / f"urgent{'-kafka' if options.kafka else '-cpu' if options.cpu_clock else ''}.json"
    file.write_text(json.dumps({"machine": machine, "command": sys.argv, **result}, indent=1))
    report(way, result)


if __name__ == "__main__":
    main()
