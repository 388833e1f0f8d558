"""How much of an answer equals float32 greedy, and when that forbids to print a speed. Pure."""

from collections.abc import Sequence
from statistics import fmean

TIE = 1e-3  # two best logits this close are a coin toss between correct engines
LEAST_SHARE = 0.9  # of the best peer's agreement at the same precision


def same_share(gaps: Sequence[float]) -> float:
    """Share of an output before the first token whose logit was more than a tie below the best one."""
    return next((index for index, gap in enumerate(gaps) if gap > TIE), len(gaps)) / len(gaps)


def agreement(outputs: Sequence[Sequence[float]]) -> float:
    """Mean share over the gaps of many outputs."""
    return fmean(same_share(gaps) for gaps in outputs)


def refusal(ours: float | None, peers: Sequence[float]) -> str | None:
    """Why the speed of a mode of ours must not be printed; None if it may."""
    if ours is None or not peers:
        return None
    best = max(peers)
    if ours >= LEAST_SHARE * best:
        return None
    return f"agrees with float32 for {ours:.3f} of an output, less than {LEAST_SHARE} of the best peer's {best:.3f}"
