"""How a step's time grows with streams and with context, beside the machine's limit; a JSON file and a picture.

python ops/bench/sweep.py --dtype bf16 --out out/bench
python ops/bench/sweep.py --streams 1,8 --contexts 128,1000 --seconds 0.2

A point is tried for `--seconds`, three times at least, and the fastest try counts: on two cores of its own a few
minutes, most of them for prompts of 4,000 and 8,000 tokens (expected, not timed).
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

# this file's folder has names of our packages: it goes to the end of the search path
HERE = str(Path(__file__).parent)
sys.path = [entry for entry in sys.path if entry != HERE] + [str(Path(__file__).parents[2]), HERE]

from limits import least_seconds, measure  # noqa: E402
from roster import OURS, ROSTER, num_threads  # noqa: E402
from steps import BLOCK_SIZE, filled_cache, least_step, rows_of  # noqa: E402

from engine.checkpoint.bundled import bundled_model_path  # noqa: E402 (the path is set above)
from engine.models import load_model  # noqa: E402
from engine.models.layers import Model  # noqa: E402

STREAMS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 256, 512, 1000, 2000, 4000, 8000)
CONTEXT, FEW_STREAMS = 256, 4  # what is held while the other grows
Point = dict[str, float]
Work = tuple[float, int, float, float]  # what `least_seconds` asks for first
Measured = list[tuple[Point, Work]]


def decode(model: Model, shapes: Iterable[tuple[int, int]], seconds: float) -> Iterator[tuple[Point, Work]]:
    """Milliseconds of a step of one token for each of some streams with some context."""
    for streams, context in shapes:
        cache = filled_cache(model, streams * -(-context // BLOCK_SIZE), streams)
        step = least_step(model, rows_of(streams, 1, context), cache, seconds)
        tokens = streams * context
        yield {"streams": streams, "context": context, "ms": step * 1e3}, (streams, streams, tokens, tokens)


def prefill(model: Model, contexts: Iterable[int], seconds: float) -> Iterator[tuple[Point, Work]]:
    """Milliseconds of a step over one whole prompt."""
    for length in contexts:
        cache = filled_cache(model, -(-length // BLOCK_SIZE), 1)
        step = least_step(model, rows_of(1, length, length), cache, seconds)
        yield {"context": length, "ms": step * 1e3}, (length, 1, length * (length + 1) / 2, length)


def plot(sweeps: dict[str, list[Point]], title: str, file: Path) -> None:
    """Above, a step's time beside the limit; below, the limit's share of it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, PercentFormatter, StrMethodFormatter

    figure, axes = pyplot.subplots(
        2,
        len(sweeps),
        figsize=(4 * len(sweeps), 5),
        layout="constrained",
        sharex="col",
        height_ratios=(3, 1.3),
        squeeze=False,
    )
    for (above, below), (name, points) in zip(axes.T, sweeps.items(), strict=True):
        across = "streams" if len({point["context"] for point in points}) == 1 and "streams" in points[0] else "context"
        x = [point[across] for point in points]
        above.loglog(x, [point["ms"] for point in points], "o-", color="#0b6e75", label="measured")
        above.loglog(x, [point["limit_ms"] for point in points], "--", color="#a03030", label="limit of the machine")
        above.set_title(name, fontsize=10)
        above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        above.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        below.semilogx(x, [point["limit_ms"] / point["ms"] for point in points], "o-", color="#0b6e75")
        below.set_ylim(0, max(1, *(point["limit_ms"] / point["ms"] for point in points)))
        below.yaxis.set_major_formatter(PercentFormatter(1))
        below.set_xticks(x, [f"{value:,.0f}" for value in x], fontsize=8, rotation=45)
        for axis in (above, below):
            axis.minorticks_off()
        below.set_xlabel(across if across == "streams" else "tokens of context")
        for axis in (above, below):
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(visible=True, which="major", color="#e4e4e4", linewidth=0.6)
    axes[0][0].set_ylabel("ms a step")
    axes[1][0].set_ylabel("share of\nthe limit")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def table(points: list[Point]) -> str:
    lines = ["| streams | context | ms a step | limit | share |", "|---|---|---|---|---|"]
    for p in points:
        cells = f"{p.get('streams', 1):.0f} | {p['context']:,.0f} | {p['ms']:.1f} | {p['limit_ms']:.1f}"
        lines.append(f"| {cells} | {p['limit_ms'] / p['ms']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16", "int8"])
    parser.add_argument("--streams", default=STREAMS, type=numbers)
    parser.add_argument("--contexts", default=CONTEXTS, type=numbers)
    parser.add_argument("--seconds", default=1.0, type=float, help="in which a point is tried, three times at least")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    machine = measure(ROSTER[OURS].python, num_threads())
    model = load_model(bundled_model_path(), dtype=options.dtype)
    asked = {
        f"decode, streams of {CONTEXT} tokens": decode(model, ((s, CONTEXT) for s in options.streams), options.seconds),
        f"decode, {FEW_STREAMS} streams by context": decode(
            model, ((FEW_STREAMS, c) for c in options.contexts), options.seconds
        ),
        "prefill of one prompt": prefill(model, options.contexts, options.seconds),
    }
    measured: dict[str, Measured] = {}
    for name, points in asked.items():
        measured[name] = list(points)
        print(f"  {name}: done", file=sys.stderr, flush=True)
        machine = machine.at_best(measure(ROSTER[OURS].python, num_threads()))
    sweeps = {
        name: [point | {"limit_ms": least_seconds(*work, options.dtype, machine) * 1e3} for point, work in points]
        for name, points in measured.items()
    }
    busy = f"load average {os.getloadavg()[2]:.1f}"
    title = f"SmolLM2-135M, {options.dtype}, {num_threads()} cores of {platform.machine()}, {busy}"
    file = options.out / f"sweep-{options.dtype}"
    report = {"command": sys.argv, "title": title, "machine": asdict(machine), "sweeps": sweeps}
    file.with_suffix(".json").write_text(json.dumps(report, indent=1))
    print(title)
    for name, points in sweeps.items():
        print(f"\n{name}\n\n{table(points)}")
    plot(sweeps, title, file.with_suffix(".png"))


if __name__ == "__main__":
    main()
