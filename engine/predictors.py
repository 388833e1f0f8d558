"""Guesses from history how long an answer gets. A wrong guess costs time, never blocks."""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from engine.request import Request


class OutputLengthPredictor:
    """Remaining tokens of a request: a quantile of past outputs of its (tenant, operation), at most `max_tokens`.

    An overrun takes the same quantile of the longer outputs; without history the answer is `max_tokens`. Remembers the
    `max_histories` pairs that answered last: clients may name tenants without end.
    """

    def __init__(
        self, *, quantile: float = 0.9, max_samples: int = 256, min_samples: int = 16, max_histories: int = 1024
    ) -> None:
        self._quantile = quantile
        self._min_samples = min_samples
        self._max_samples = max_samples
        self._max_histories = max_histories
        self.num_predictions = 0
        self.error_tokens_total = 0
        self._history: OrderedDict[tuple[str, str], _Lengths] = OrderedDict()

    def __repr__(self) -> str:
        return f"OutputLengthPredictor(histories={len(self._history)})"

    def remaining_tokens(self, request: Request) -> int:
        done = len(request.output_token_ids)
        known = self._history.get((request.tenant, request.operation))
        num_shorter = 0 if known is None else bisect_right(known.ordered, done)
        if known is None or len(known.ordered) - num_shorter < self._min_samples:
            return request.max_new_tokens
        place = num_shorter + int(self._quantile * (len(known.ordered) - num_shorter - 1))
        return min(known.ordered[place] - done, request.max_new_tokens)

    def observe(self, request: Request) -> None:
        """The request has ended by itself: its length is history, and tells how good a guess at its start was."""
        key, length = (request.tenant, request.operation), len(request.output_token_ids)
        known = self._history.setdefault(key, _Lengths())
        if len(known.ordered) >= self._min_samples:
            guess = min(known.ordered[int(self._quantile * (len(known.ordered) - 1))], request.params.max_tokens)
            self.num_predictions += 1
            self.error_tokens_total += abs(guess - length)
        known.add(length, self._max_samples)
        self._history.move_to_end(key)
        if len(self._history) > self._max_histories:
            self._history.popitem(last=False)


@dataclass(slots=True)
class _Lengths:
    """The last lengths, as they came and in order."""

    latest: deque[int] = field(default_factory=deque)
    ordered: list[int] = field(default_factory=list)

    def add(self, length: int, max_samples: int) -> None:
        self.latest.append(length)
        insort(self.ordered, length)
        if len(self.latest) > max_samples:
            del self.ordered[bisect_left(self.ordered, self.latest.popleft())]
