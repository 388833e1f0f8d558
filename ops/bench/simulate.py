"""Replays a request trace through the real scheduler and cache manager on virtual time: no tensors, no model, no disk.

python ops/bench/simulate.py TRACE.jsonl --requests 2000 --speed 0.15 --l2-tokens 250000,500000,1000000 --out out/bench
python ops/bench/simulate.py TRACE.jsonl --policies --l2-tokens 250000
python ops/bench/simulate.py long-answers --policies --l2-tokens 16000 --block-size 16 --speed 0.5

Traces of the Mooncake format: a line has timestamp (ms), input_length, output_length and hash_ids (blocks of 512
tokens). A step takes what `cost` says; by default about what an accelerator with a model of 8 billion weights does.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

# this file must not hide the package of the same name: its folder goes to the end of the search path
HERE = str(Path(__file__).parent)
sys.path = [entry for entry in sys.path if entry != HERE] + [str(Path(__file__).parents[2]), HERE]

from percentiles import percentiles  # noqa: E402
from traces import TraceRequest, infinite_cache_ratio, long_answers, read_trace  # noqa: E402
from virtual import VirtualTransfers, virtual_ssd  # noqa: E402

from engine import starts as starts_module  # noqa: E402
from engine.api import Decision  # noqa: E402
from engine.batch import SampledRow  # noqa: E402
from engine.cache.cold import ColdTier  # noqa: E402
from engine.cache.cold_admission import ColdAdmission  # noqa: E402
from engine.cache.manager import KVCacheManager  # noqa: E402
from engine.cache.transfers import Transfers  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.predictors import OutputLengthPredictor  # noqa: E402
from engine.request import Request  # noqa: E402
from engine.sampling_params import SamplingParams  # noqa: E402
from engine.scheduler import Scheduler  # noqa: E402
from engine.step_time import StepLoad  # noqa: E402

ROOT, END = b"trace", 1
TIERS = {"no SSD": None, "LRU": ColdAdmission.FIRST, "room": ColdAdmission.ROOM, "second-touch": ColdAdmission.SECOND}
LONG_ANSWERS = "long-answers"
SMALL_TENANT = 10
"""Of so many requests one is of the small tenant."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step: a + tokens prefilled * b + sequences decoded * c + keys read * d; and of a block's read."""

    step: float = 4e-3
    prefill_token: float = 1e-4
    decode: float = 1e-4
    key: float = 2e-9
    ssd_bytes_per_second: float = 5e9
    bytes_per_token: int = 131_072

    def of(self, load: StepLoad) -> float:
        prefill, decode = load.num_prefill_tokens * self.prefill_token, load.num_decodes * self.decode
        return self.step + prefill + decode + load.num_keys_read * self.key


@dataclass(frozen=True, slots=True)
class Policy:
    """What is switched on."""

    prediction: bool = True
    squeeze: bool = True
    fairness: bool = True
    target_seconds: float | None = None


@dataclass(slots=True)
class Outcome:
    """Of one replay."""

    first: list[float] = field(default_factory=list)
    first_small: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_l2: int = 0
    num_l3: int = 0
    num_computed: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    preemptions: int = 0
    squeezed: int = 0

    def row(self) -> dict[str, float]:
        first, gaps = list(percentiles(self.first).values()), list(percentiles(self.gaps).values())
        small = list(percentiles(self.first_small).values())
        return {
            "hit L2 %": 100 * self.num_l2 / self.num_prompt,
            "hit SSD %": 100 * self.num_l3 / self.num_prompt,
            "TTFT p50": first[0],
            "TTFT p95": first[1],
            "TTFT p99": first[2],
            "small tenant p95": small[1],
            "gap p99 ms": 1000 * gaps[2],
            "minutes": self.seconds / 60,
            "busy %": 100 * self.busy / self.seconds,
            "recomputed %": 100 * (self.num_computed + self.num_l2 + self.num_l3 - self.num_prompt) / self.num_prompt,
            "preempted": self.preemptions,
            "squeezed in": self.squeezed,
        }


class Replay:
    """One trace through one configuration."""

    def __init__(
        self,
        requests: list[TraceRequest],
        config: EngineConfig,
        cost: Cost,
        policy: Policy,
        ssd: VirtualTransfers | None,
    ) -> None:
        self.cost, self.policy, self.ssd = cost, policy, ssd
        self.config = config
        self.cache = KVCacheManager(config.num_blocks, config.block_size)
        if ssd is not None:
            self.cache.cold = ColdTier(self.cache.pool, cast(Transfers, ssd), config.block_size)
        lengths = OutputLengthPredictor(min_samples=16 if policy.prediction else 10**9)
        self.scheduler = Scheduler(config, self.cache, lengths=lengths)
        self.coming = iter(requests)
        self.next = next(self.coming, None)
        self.live: dict[str, tuple[Request, TraceRequest]] = {}
        self.last_token: dict[str, float] = {}
        self.now = 0.0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        while self.next is not None or self.live:
            self._arrivals()
            if self.ssd is not None:
                self.ssd.now = self.now
            batch = self.scheduler.schedule(self.now)
            if self.cache.cold is not None:
                self.cache.cold.copy_planned()
            if not batch.rows:
                self.now = max(self.now + 1e-6, min(self._moments()))
                continue
            load = StepLoad.of(batch)
            seconds = self.cost.of(load)
            self.now += seconds
            self.outcome.busy += seconds
            self.outcome.num_computed += load.num_prefill_tokens
            self.scheduler.step_times.observe(load, seconds)
            result = self.scheduler.update(batch, [self._token(row.request_id) for row in batch.rows if row.sample])
            for request, _ in result.advanced:
                self._advanced(request)
            for request in result.finished:
                del self.live[request.request_id]
                self.last_token.pop(request.request_id, None)
        self.outcome.seconds = self.now
        self.outcome.preemptions = self.scheduler.num_preemptions
        self.outcome.squeezed = self.scheduler.decisions[Decision.SQUEEZED_IN]
        return self.outcome

    def _moments(self) -> Iterator[float]:
        if self.next is not None:
            yield self.next.arrival_seconds
        if self.ssd is not None and self.ssd.next_landing is not None:
            yield self.ssd.next_landing

    def _arrivals(self) -> None:
        while self.next is not None and self.next.arrival_seconds <= self.now:
            asked, self.next = self.next, next(self.coming, None)
            is_small = asked.number % SMALL_TENANT == 0
            request = Request(
                f"{asked.number}",
                (asked.number,) * asked.num_input,
                SamplingParams(max_tokens=2048, temperature=0),
                ROOT,
                eos_token_ids=frozenset({END}),
                tenant="small" if is_small and self.policy.fairness else "large",
                arrival_seconds=asked.arrival_seconds,
                block_hashes=asked.block_hashes(self.config.block_size),
            )
            self.live[request.request_id] = request, asked
            self.scheduler.add(request)

    def _token(self, request_id: str) -> SampledRow:
        request, asked = self.live[request_id]
        return SampledRow(request_id, END if len(request.output_token_ids) + 1 >= asked.num_output else 0)

    def _advanced(self, request: Request) -> None:
        outcome, asked = self.outcome, self.live[request.request_id][1]
        if len(request.output_token_ids) > 1:
            outcome.gaps.append(self.now - self.last_token[request.request_id])
        else:
            waited = self.now - request.arrival_seconds
            outcome.first.append(waited)
            if asked.number % SMALL_TENANT == 0:
                outcome.first_small.append(waited)
            outcome.num_prompt += request.num_prompt_tokens
            outcome.num_l2 += request.num_cached_tokens - request.num_loaded_tokens
            outcome.num_l3 += request.num_loaded_tokens
        self.last_token[request.request_id] = self.now


def replay(
    requests: list[TraceRequest], options: argparse.Namespace, l2_tokens: int, tier: str, policy: Policy
) -> dict[str, Any]:
    cost, size = Cost(), options.block_size
    config = EngineConfig(
        block_size=size,
        num_blocks=l2_tokens // size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=8192,
        prefill_chunk_size=8192,
        max_model_len=1 << 20,
        inter_token_target_seconds=policy.target_seconds,
    )
    ssd = None
    if (admission := TIERS[tier]) is not None:
        block_seconds = size * cost.bytes_per_token / cost.ssd_bytes_per_second
        ssd = virtual_ssd(
            options.ssd_tokens // size,
            admission=admission,
            block_seconds=block_seconds,
            token_seconds=cost.prefill_token,
        )
    starts_module.MAX_SQUEEZE_LOOKS = 16 if policy.squeeze else 0
    began = time.monotonic()
    fitting = [r for r in requests if config.num_blocks * size >= r.num_input + 2048]
    outcome = Replay(fitting, config, cost, policy, ssd).run()
    row = {"L2 tokens": l2_tokens, "tier": tier, "too large": len(requests) - len(fitting), **outcome.row()}
    if ssd is not None:
        row["SSD written blocks"] = ssd.tier.counters.blocks_written
    print(f"  {l2_tokens} {tier}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return row


POLICIES = {
    "all": Policy(),
    "no prediction": Policy(prediction=False),
    "no squeezing in": Policy(squeeze=False),
    "one tenant": Policy(fairness=False),
    "target 100 ms": Policy(target_seconds=0.1),
}


def table(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name, "")) for name in names] for row in rows]
    lines = [names, ["---"] * len(names), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help=f"a file, or {LONG_ANSWERS}: prompts made up here, with long answers")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--speed", type=float, default=0.15, help="of arrivals, against the trace")
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--l2-tokens", default="250000,500000,1000000", type=lambda t: [int(x) for x in t.split(",")])
    parser.add_argument("--ssd-tokens", type=int, default=8_000_000)
    parser.add_argument("--tiers", default=",".join(TIERS), help="LRU: every block is written to the SSD")
    parser.add_argument("--policies", action="store_true", help="what each scheduling policy is worth, without SSD")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    if str(options.trace) == LONG_ANSWERS:
        requests = long_answers(options.requests, seconds_between=0.1 / options.speed)
    else:
        requests = read_trace(options.trace, limit=options.requests, speed=options.speed)
    bound = infinite_cache_ratio(requests, options.block_size)
    rows = []
    if options.policies:
        for name, policy in POLICIES.items():
            rows.append({"policy": name, **replay(requests, options, options.l2_tokens[0], "no SSD", policy)})
    else:
        for l2_tokens in options.l2_tokens:
            rows += [replay(requests, options, l2_tokens, tier, Policy()) for tier in options.tiers.split(",")]
    print(f"{options.trace.stem}: {len(requests)} requests at {options.speed} times their pace")
    print(f"A cache without end hits {100 * bound:.1f} % of prompt tokens.\n\n{table(rows)}")
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"simulate-{options.trace.stem}{'-policies' if options.policies else ''}"
    result = {"command": sys.argv, "bound": bound, "rows": rows}
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=1))
    if not options.policies:
        from simulate_plot import plot

        plot(rows, bound, options.trace.stem, options.out / f"{name}.png")


if __name__ == "__main__":
    main()
