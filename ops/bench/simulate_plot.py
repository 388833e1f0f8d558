"""The picture of a simulation: hit ratio and time to first token over the size of L2, a line a tier policy."""

from pathlib import Path
from typing import Any

COLOURS = {"no SSD": "#b9b9b9", "LRU": "#d98c3f", "room": "#5b7fb8", "second-touch": "#0b6e75"}


def plot(rows: list[dict[str, Any]], bound: float, name: str, file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (hits, first) = pyplot.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    for tier, colour in COLOURS.items():
        own = [row for row in rows if row["tier"] == tier]
        if not own:
            continue
        sizes = [row["L2 tokens"] / 1e6 for row in own]
        hits.plot(sizes, [row["hit L2 %"] + row["hit SSD %"] for row in own], "o-", color=colour, label=tier)
        hits.plot(sizes, [row["hit L2 %"] for row in own], ":", color=colour)
        first.plot(sizes, [row["TTFT p50"] for row in own], "o-", color=colour, label=f"{tier}, p50")
        first.plot(sizes, [row["TTFT p95"] for row in own], "s--", color=colour, label=f"{tier}, p95")
    hits.axhline(100 * bound, color="#a03030", linewidth=1.2)
    hits.text(hits.get_xlim()[0], 100 * bound, " cache without end", va="bottom", fontsize=8, color="#a03030")
    hits.set_title(f"{name}: prompt tokens from the cache, % (dotted: L2)", fontsize=10)
    first.set_title("time to first token, seconds", fontsize=10)
    first.set_yscale("log")
    for axis in (hits, first):
        axis.set_xlabel("million tokens of L2", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=7)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
