"""Which class intake serves next: weighted deficit round robin in tokens, with ageing. A pure decision."""

from collections.abc import Collection, Mapping

from engine.api import PriorityClass


class FairQueue:
    """Over time busy classes share tokens by their weights, and no class that is ready waits longer than the age limit.

    A class without work gains no credit. `quantum_tokens` is the share of weight 1 in a round.
    """

    def __init__(
        self, weights: Mapping[PriorityClass, float], *, max_age_seconds: float = 10.0, quantum_tokens: int = 512
    ) -> None:
        if any(weights.get(cls, 0.0) <= 0 for cls in PriorityClass):
            raise ValueError("every priority class needs a weight above 0")
        self._quantum = {cls: weights[cls] * quantum_tokens for cls in PriorityClass}
        self._max_age = max_age_seconds
        self._credit = dict.fromkeys(PriorityClass, 0.0)
        self._ready_since: dict[PriorityClass, float] = {}

    def __repr__(self) -> str:
        return f"FairQueue({', '.join(f'{cls}={credit:.0f}' for cls, credit in self._credit.items())})"

    def choose(self, ready: Collection[PriorityClass], now: float) -> PriorityClass | None:
        """The class to poll, of those that may be polled; None if there is none."""
        for cls in PriorityClass:
            if cls in ready:
                self._ready_since.setdefault(cls, now)
            else:
                self._ready_since.pop(cls, None)
        if not self._ready_since:
            return None
        eldest = min(self._ready_since, key=lambda cls: self._ready_since[cls])
        if now - self._ready_since[eldest] > self._max_age:
            return eldest
        in_order = [cls for cls in PriorityClass if cls in self._ready_since]
        if all(self._credit[cls] <= 0 for cls in in_order):
            rounds = min(-self._credit[cls] // self._quantum[cls] + 1 for cls in in_order)
            for cls in in_order:
                self._credit[cls] = min(self._credit[cls] + rounds * self._quantum[cls], self._quantum[cls])
        return next(cls for cls in in_order if self._credit[cls] > 0)

    def charge(self, cls: PriorityClass, tokens: int, now: float) -> None:
        """`cls` was served with this many tokens."""
        self._credit[cls] -= tokens
        self._ready_since[cls] = now

    def empty(self, cls: PriorityClass) -> None:
        """`cls` was asked and had nothing: it keeps its debts and saves no credit."""
        self._credit[cls] = min(self._credit[cls], 0.0)
        self._ready_since.pop(cls, None)
