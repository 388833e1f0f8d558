"""Figures of a run and their table: medians, ratios to the best peer of the precision, shares of the limit. Pure."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from limits import Machine, bound
from peers.api import Prompt
from percentiles import percentiles
from quality import refusal
from roster import OURS

METRICS = {
    "W1": ("decode",),
    "W2": ("output",),
    "W3": ("prefill", "total"),
    "W4": ("total",),
}  # tokens a second; the first is the one that the ratio of a workload is about


def rates(workload: str, num_in: int, num_out: int, prefill: float, total: float) -> dict[str, float]:
    """`prefill` is when the last first token came, or for one stream the only one; `total` is the end of all."""
    every = {
        "decode": (num_out - 1) / (total - prefill) if total > prefill else 0.0,
        "output": num_out / total,
        "prefill": num_in / prefill,
        "total": (num_in + num_out) / total,
    }
    return {metric: every[metric] for metric in METRICS[workload]}


def summary(
    workload: str, precision: str, entries: dict[str, Any], prompts: list[list[Prompt]], machine: Machine
) -> dict[str, Any]:
    """Every engine's figures at one precision; `limit` is what the machine allows, the mean over the repetitions."""
    if workload == "NLL":
        return {"engines": entries}
    limits = []
    for part in prompts:
        least = bound(part, precision, machine)
        limits.append(rates(workload, *_counts(part), least.prefill, least.prefill + least.decode))
    engines = {}
    for name, entry in entries.items():
        runs = [
            rates(workload, *_counts(part), max(run["first"]), max(run["last"]))
            for part, run in zip(prompts, entry["runs"], strict=True)
        ]
        firsts = [seconds for run in entry["runs"] for seconds in run["first"]]
        engines[name] = {
            "name": entry["name"],
            "settings": entry["settings"],
            "speed": {metric: median(run[metric] for run in runs) for metric in METRICS[workload]},
            "runs": runs,
            "first_token_seconds": percentiles(firsts),
            "peak_mb": entry["peak_mb"],
            "agreement": entry.get("agreement"),
            "num_judged": entry.get("num_judged", 0),
        }
    limit = {metric: fmean(part[metric] for part in limits) for metric in METRICS[workload]}
    result = {"engines": engines, "limit": limit, "machine": asdict(machine)}
    for metric in METRICS[workload]:
        _compare(engines, metric, limit[metric])
    return result


def _counts(prompts: list[Prompt]) -> tuple[int, int]:
    return sum(len(p.token_ids) for p in prompts), sum(p.num_out for p in prompts)


def _compare(engines: dict[str, Any], metric: str, limit: float) -> None:
    """Each engine against the fastest peer, run by run, and against the limit."""
    peers = [name for name in engines if name != OURS]
    best = max(peers, key=lambda name: engines[name]["speed"][metric], default=None)
    for engine in engines.values():
        engine.setdefault("share", {})[metric] = engine["speed"][metric] / limit
        if best is not None:
            pairs = zip(engine["runs"], engines[best]["runs"], strict=True)
            engine.setdefault("ratio", {})[metric] = median(a[metric] / b[metric] for a, b in pairs)


@dataclass(slots=True)
class Results:
    """What is known so far: workload, then precision, then the summary."""

    workloads: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    command: str = ""

    @classmethod
    def load(cls, file: Path) -> "Results":
        return cls(**json.loads(file.read_text()))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def add(self, workload: str, precision: str, summary: dict[str, Any]) -> None:
        self.workloads.setdefault(workload, {})[precision] = summary

    def refusals(self) -> dict[str, str]:
        """Precisions whose speed of ours must not be shown, by the agreement over all workloads together."""
        found = {}
        for precision in {p for parts in self.workloads.values() for p in parts}:
            shares = self.agreements(precision)
            reason = refusal(shares.pop(OURS, None), list(shares.values()))
            if reason is not None:
                found[precision] = reason
        return found

    def agreements(self, precision: str) -> dict[str, float]:
        """Mean agreement of each engine over every answer that was judged, of all workloads."""
        sums: dict[str, list[float]] = {}
        for parts in self.workloads.values():
            for name, engine in parts.get(precision, {}).get("engines", {}).items():
                if engine.get("agreement") is not None:
                    total = sums.setdefault(name, [0.0, 0.0])
                    total[0] += engine["agreement"] * engine["num_judged"]
                    total[1] += engine["num_judged"]
        return {name: agreed / judged for name, (agreed, judged) in sums.items()}


def table(results: Results) -> str:
    """The whole as Markdown."""
    refusals = results.refusals()
    lines = [f"{results.machine}. Tokens a second, medians; ratio to the best peer of the same precision.", ""]
    if any(workload in results.workloads for workload in METRICS):
        lines += [
            "| workload | precision | engine | tokens/s | ratio | of limit | TTFT p50/p95/p99 s | peak MB | agrees |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
    for workload in METRICS:
        for precision, part in results.workloads.get(workload, {}).items():
            for name, engine in part["engines"].items():
                lines.append(_row(workload, precision, name, engine, name == OURS and precision in refusals))
            limit = ", ".join(f"{metric} {value:,.0f}" for metric, value in part["limit"].items())
            lines.append(f"| {workload} | {precision} | *limit* | {limit} | | 1 | | | |")
    if likelihoods := results.workloads.get("NLL"):
        lines += ["", "| engine | precision | nats a token, 16,384 tokens |", "|---|---|---|"]
        for precision, part in likelihoods.items():
            for name, engine in part["engines"].items():
                nll = "-" if engine["nll"] is None else f"{engine['nll']:.4f}"
                lines.append(f"| {name} | {precision} | {nll} |")
    lines += [f"\n{place}: faster than the limit, which was measured on a busier machine" for place in _over(results)]
    lines += [f"\nours in {precision} is not shown: it {reason}" for precision, reason in refusals.items()]
    lines += [f"\nmissing: {name} ({reason})" for name, reason in results.missing.items()]
    return "\n".join(lines) + "\n"


def _over(results: Results) -> list[str]:
    """Where a share of the limit is above 1, which only a limit that was measured too low can give."""
    return [
        f"{workload} {precision}"
        for workload, parts in results.workloads.items()
        for precision, part in parts.items()
        if any(share > 1 for engine in part["engines"].values() for share in engine.get("share", {}).values())
    ]


def _row(workload: str, precision: str, name: str, engine: dict[str, Any], refused: bool) -> str:
    def joined(values: dict[str, float], form: str) -> str:
        return " / ".join(format(values[m], form) for m in METRICS[workload]) if values else "-"

    named = " / ".join(METRICS[workload])
    agrees = "-" if engine["agreement"] is None else f"{engine['agreement']:.3f}"
    if refused:
        return f"| {workload} | {precision} | {name} | not shown | | | | {engine['peak_mb']:,.0f} | {agrees} |"
    speed = f"{named} {joined(engine['speed'], ',.0f')}"
    first = "/".join(f"{engine['first_token_seconds'][f'p{q}']:.2f}" for q in (50, 95, 99))
    ratio, share = joined(engine.get("ratio", {}), ".2f"), joined(engine["share"], ".2f")
    figures = f"{speed} | {ratio} | {share} | {first} | {engine['peak_mb']:,.0f}"
    return f"| {workload} | {precision} | {name} | {figures} | {agrees} |"
