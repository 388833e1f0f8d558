"""How a step's time grows with streams and with context, beside the machine's limit; a JSON file and a picture.

python ops/bench/sweep.py --dtype bf16 --out out/bench
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
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


def decode(model: Model, shapes: Iterable[tuple[int, int]]) -> Iterator[tuple[Point, Work]]:
    """Milliseconds of a step of one token for each of some streams with some context."""
    for streams, context in shapes:
        cache = filled_cache(model, streams * -(-context // BLOCK_SIZE), streams)
        step = least_step(model, rows_of(streams, 1, context), cache)
        tokens = streams * context
        yield {"streams": streams, "context": context, "ms": step * 1e3}, (streams, streams, tokens, tokens)


def prefill(model: Model) -> Iterator[tuple[Point, Work]]:
    """Milliseconds of a step over one whole prompt."""
    for length in CONTEXTS:
        cache = filled_cache(model, -(-length // BLOCK_SIZE), 1)
        step = least_step(model, rows_of(1, length, length), cache)
        yield {"context": length, "ms": step * 1e3}, (length, 1, length * (length + 1) / 2, length)


def plot(sweeps: dict[str, list[Point]], title: str, file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(sweeps), figsize=(4 * len(sweeps), 3.6), layout="constrained")
    for axis, (name, points) in zip(axes, sweeps.items(), strict=True):
        across = "streams" if name.startswith("decode, streams") else "context"
        x = [point[across] for point in points]
        axis.loglog(x, [point["ms"] for point in points], "o-", color="#0b6e75", label="measured")
        axis.loglog(x, [point["limit_ms"] for point in points], "--", color="#a03030", label="limit of the machine")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("streams" if across == "streams" else "tokens of context")
        axis.set_ylabel("ms a step")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16", "int8"])
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    machine = measure(ROSTER[OURS].python, num_threads())
    model = load_model(bundled_model_path(), dtype=options.dtype)
    measured = {
        f"decode, streams of {CONTEXT} tokens": list(decode(model, ((s, CONTEXT) for s in STREAMS))),
        f"decode, {FEW_STREAMS} streams by context": list(decode(model, ((FEW_STREAMS, c) for c in CONTEXTS))),
        "prefill of one prompt": list(prefill(model)),
    }
    machine = machine.at_best(measure(ROSTER[OURS].python, num_threads()))
    sweeps = {
        name: [point | {"limit_ms": least_seconds(*work, options.dtype, machine) * 1e3} for point, work in points]
        for name, points in measured.items()
    }
    file = options.out / f"sweep-{options.dtype}"
    file.with_suffix(".json").write_text(json.dumps(sweeps, indent=1))
    plot(sweeps, f"SmolLM2-135M, {options.dtype}, {num_threads()} cores", file.with_suffix(".png"))


if __name__ == "__main__":
    main()
