"""The picture of a run: a panel a workload, a bar an engine, the machine's limit above each precision."""

from pathlib import Path

from report import METRICS, Results
from roster import OURS, ROSTER

COLOURS = dict(zip(ROSTER, ("#0b6e75", "#b9b9b9", "#d98c3f", "#5b7fb8", "#8f6bb0"), strict=True))


def plot(results: Results, file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [workload for workload in METRICS if results.workloads.get(workload)]
    if not shown:
        return
    refusals = results.refusals()
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(max(5.0, 3.6 * len(shown)), 3.8), layout="constrained", squeeze=False
    )
    named: dict[str, object] = {}
    for axis, workload in zip(axes[0], shown, strict=True):
        metric, ticks, place = METRICS[workload][0], [], 0.0
        tallest = 0.0
        for precision, part in results.workloads[workload].items():
            engines = {n: e for n, e in part["engines"].items() if not (n == OURS and precision in refusals)}
            start = place
            for name, engine in engines.items():
                value = engine["speed"][metric]
                named[name] = axis.bar(place, value, width=0.9, color=COLOURS[name])
                axis.text(place, value, f"{value:,.0f}", ha="center", va="bottom", fontsize=7)
                tallest, place = max(tallest, value), place + 1
            limit = part["limit"][metric]
            axis.hlines(limit, start - 0.5, place - 0.5, color="#a03030", linewidth=1.2)
            middle = (start + place - 1) / 2
            axis.text(middle, limit, f"limit {limit:,.0f}", ha="center", va="bottom", fontsize=7, color="#a03030")
            tallest = max(tallest, limit)
            ticks.append((middle, precision))
            place += 1
        axis.set_ylim(0, tallest * 1.08)
        axis.set_xticks([tick for tick, _ in ticks], [label for _, label in ticks])
        axis.set_title(f"{workload}: {metric} tokens/s", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named), frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
