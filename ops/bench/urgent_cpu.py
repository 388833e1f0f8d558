"""Urgent prompts under bulk on the clock of the process's own CPU time: for a machine that others use as well.

The core is driven by this thread alone, with one thread for its operations, so a second of CPU time is a second of an
engine that has a core for itself. Prompts arrive at their moment of that clock; while nothing runs it jumps.
"""

import argparse
import random
import sys
import time
from collections import deque
from typing import Any

import torch
from recording import RecordingRunner, work_between
from urgent import (
    BULK_OUT,
    BULK_TOKENS,
    CONFIG,
    NUM_BULK,
    URGENT_OUT,
    URGENT_TOKENS,
    VARIANTS,
    Prompts,
    arrivals_of,
    results,
    switch,
)
from workloads import corpus

from engine.api import PriorityClass
from engine.checkpoint.bundled import bundled_model_path
from engine.loaded_model import LoadedModel
from engine.loading import load_model_and_core
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.step_result import StepResult


class CpuClock:
    """Seconds of CPU time, plus what was jumped over."""

    def __init__(self) -> None:
        self._jumped = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._jumped

    def jump_to(self, moment: float) -> None:
        self._jumped += max(0.0, moment - self())


class Drive:
    """A `Door`: hands prompts in when their time has come, and notes when tokens came out."""

    def __init__(self, loaded: LoadedModel, prompts: Prompts, clock: CpuClock) -> None:
        self.core, self.prompts, self.clock = loaded.core, prompts, clock
        self.arrivals: deque[tuple[float, str]] = deque()
        self.tokens: dict[str, list[float]] = {}
        self.open: set[str] = set()

    def add(self, name: str, priority: PriorityClass, length: int, num_out: int, arrival: float) -> None:
        params = SamplingParams(max_tokens=num_out, temperature=0, ignore_eos=True)
        tokens = self.prompts.cut(length)
        self.tokens[name] = []
        self.open.add(name)
        self.core.add(Request(name, tokens, params, b"root", priority=priority, arrival_seconds=arrival))

    def look(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.clock():
            moment, name = self.arrivals.popleft()
            self.add(name, PriorityClass.URGENT, URGENT_TOKENS, URGENT_OUT, moment)

    def publish(self, result: StepResult) -> None:
        now = self.clock()
        for request, _ in result.advanced:
            self.tokens[request.request_id].append(now)
        self.open -= {request.request_id for request in result.finished}

    def phase(self, name: str, *, bulk: bool, rate: float, arrivals: int, seconds: float = 0.0) -> dict[str, Any]:
        """Like `urgent.phase`."""
        rng, wall = random.Random(name), time.monotonic()
        self.tokens.clear()
        count = began = 0.0
        ended: float | None = None
        moments: list[float] = []
        while ended is None:
            self.look()
            while bulk and sum(one.startswith("bulk") for one in self.open) < NUM_BULK:
                count += 1
                self.add(f"bulk-{name}-{count}", PriorityClass.BULK, BULK_TOKENS, BULK_OUT, self.clock())
            if not self.open and self.arrivals:
                self.clock.jump_to(self.arrivals[0][0])
                continue
            if self.open:
                self.publish(self.core.step(self))
            is_full = not bulk or any(times for one, times in self.tokens.items() if one.startswith("bulk"))
            if not began and is_full:
                began = moment = self.clock()
                for number in range(arrivals):
                    moment += rng.expovariate(rate)
                    moments.append(moment)
                    self.arrivals.append((moment, f"urgent-{name}-{number}"))
            urgent_open = any(one.startswith("urgent") for one in self.open)
            if began and not self.arrivals and not urgent_open and self.clock() >= began + seconds:
                ended = self.clock()
        for one in list(self.open):
            self.core.abort(one)
        self.open.clear()
        first = [self.tokens[f"urgent-{name}-{n}"][0] - moment for n, moment in enumerate(moments)]
        bulk_times = [times for one, times in self.tokens.items() if one.startswith("bulk")]
        gaps = [b - a for times in bulk_times for a, b in zip(times, times[1:], strict=False)]  # noqa: RUF007
        spent = f"{ended - began:.0f} s of CPU time, {time.monotonic() - wall:.0f} s"
        print(f"  {name}: {len(first)} urgent answers in {spent}", file=sys.stderr, flush=True)
        return {"began": began, "ended": ended, "first": first, "moments": moments, "gaps": gaps}


def measure_cpu(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    clock = CpuClock()
    loaded = load_model_and_core(
        bundled_model_path(), CONFIG, name=None, dtype=options.dtype, exact_modules=(), few_rows=True, check=False
    )
    recording = RecordingRunner(loaded.core.runner, clock)
    loaded.core.runner = recording
    loaded.core._clock = clock
    drive = Drive(loaded, Prompts(corpus(loaded.tokenizer.encode_text)), clock)
    phase = drive.phase
    phase("warm", bulk=True, rate=1.0, arrivals=1)
    alone = [phase("alone", bulk=True, rate=1.0, arrivals=0, seconds=options.seconds)]
    capacity = work_between(recording.steps, alone[0]["began"], alone[0]["ended"])["tokens_per_second"]
    idle: list[dict[str, Any]] = []
    runs: dict[str, list[dict[str, Any]]] = {}
    for turn in range(options.rounds):
        for share, arrivals in zip(options.shares, options.arrivals, strict=True):
            rate, each = share * capacity / (URGENT_TOKENS + URGENT_OUT), -(-arrivals // options.rounds)
            idle.append(phase(f"idle{turn}-{share}", bulk=False, rate=rate, arrivals=each))
            for variant, interrupts in VARIANTS.items():
                switch(loaded, interrupts)
                count = arrivals_of(variant, each)
                run = phase(f"{variant}{turn}-{share}", bulk=True, rate=rate, arrivals=count)
                runs.setdefault(f"{variant} {100 * share:g} %", []).append(run)
        alone.append(phase(f"alone{turn}", bulk=True, rate=1.0, arrivals=0, seconds=options.seconds))
    return results(capacity, idle, alone, runs, recording.steps)
