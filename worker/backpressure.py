"""Which classes intake leaves alone while the KV cache is full. A pure decision."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.api import PriorityClass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """A class pauses at `pause_at` KV utilisation and resumes below `resume_at` (ratios)."""

    pause_at: float
    resume_at: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.resume_at < self.pause_at <= 1.0:
            raise ValueError(f"need 0 <= resume_at < pause_at <= 1, got {self.resume_at} and {self.pause_at}")


DEFAULT_THRESHOLDS: Mapping[PriorityClass, Thresholds] = {
    PriorityClass.URGENT: Thresholds(0.98, 0.93),
    PriorityClass.STANDARD: Thresholds(0.92, 0.85),
    PriorityClass.BULK: Thresholds(0.85, 0.75),
}


class Backpressure:
    """A class pauses at once when its threshold is crossed and stays paused for at least the dwell time.

    Raises ValueError unless bulk pauses first and urgent last.
    """

    def __init__(
        self, thresholds: Mapping[PriorityClass, Thresholds] = DEFAULT_THRESHOLDS, *, dwell_seconds: float = 0.5
    ) -> None:
        in_order = [thresholds[cls].pause_at for cls in PriorityClass]
        if in_order != sorted(in_order, reverse=True):
            raise ValueError(f"bulk must pause first and urgent last, got {in_order}")
        self._thresholds = dict(thresholds)
        self._dwell = dwell_seconds
        self._paused_since: dict[PriorityClass, float] = {}

    def __repr__(self) -> str:
        return f"Backpressure(paused={sorted(self._paused_since)})"

    def update(self, utilisation: float, now: float) -> frozenset[PriorityClass]:
        """The classes that are paused from now on."""
        for cls, limits in self._thresholds.items():
            if utilisation >= limits.pause_at:
                self._paused_since.setdefault(cls, now)
            elif utilisation < limits.resume_at and now - self._paused_since.get(cls, now) >= self._dwell:
                self._paused_since.pop(cls, None)
        return frozenset(self._paused_since)
