"""Percentiles of what was measured: by the nearest rank, so that each is a value that occurred."""

from collections.abc import Sequence


def percentile(values: Sequence[float], percent: int) -> float:
    """NaN where nothing was measured."""
    if not values:
        return float("nan")
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99."""
    return {f"p{percent}": percentile(values, percent) for percent in (50, 95, 99)}
