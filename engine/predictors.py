"""Guesses from history: how long an answer gets, and how long a step takes. A wrong guess costs time, never blocks."""

from collections import OrderedDict, deque

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
        self._history: OrderedDict[tuple[str, str], deque[int]] = OrderedDict()

    def __repr__(self) -> str:
        return f"OutputLengthPredictor(histories={len(self._history)})"

    def remaining_tokens(self, request: Request) -> int:
        done = len(request.output_token_ids)
        longer = sorted(
            length for length in self._history.get((request.tenant, request.operation), ()) if length > done
        )
        if len(longer) < self._min_samples:
            return request.max_new_tokens
        return min(longer[int(self._quantile * (len(longer) - 1))] - done, request.max_new_tokens)

    def observe(self, request: Request) -> None:
        key = (request.tenant, request.operation)
        self._history.setdefault(key, deque(maxlen=self._max_samples)).append(len(request.output_token_ids))
        self._history.move_to_end(key)
        if len(self._history) > self._max_histories:
            self._history.popitem(last=False)


class StepTimePredictor:
    """Seconds of a step as a moving average per token; the scheduler's budget may be cut by it."""

    def __init__(self, *, weight: float = 0.1) -> None:
        self._weight = weight
        self._seconds_per_token = 0.0

    def predict_seconds(self, num_tokens: int) -> float:
        return self._seconds_per_token * num_tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        sample = seconds / max(1, num_tokens)
        self._seconds_per_token += (self._weight if self._seconds_per_token else 1.0) * (
            sample - self._seconds_per_token
        )
