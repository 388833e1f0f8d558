"""How long a step takes, fitted on line to the steps that ran."""

from dataclasses import dataclass

from engine.batch import ScheduledBatch

_SCALES = (1.0, 256.0, 16.0, 65536.0)  # so that the four parts are of one size
_FORGETTING = 0.99
_PRIOR = 100.0
_MIN_STEPS = 8
_OUTLIER = 2.0


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step costs by: tokens prefilled, sequences decoded, and keys read (summed over all new tokens)."""

    num_prefill_tokens: int = 0
    num_decodes: int = 0
    num_keys_read: int = 0

    @classmethod
    def of(cls, batch: ScheduledBatch) -> "StepLoad":
        load = cls()
        for row in batch.rows:
            load = load.plus(row.start, len(row.token_ids))
        return load

    def plus(self, start: int, num_tokens: int) -> "StepLoad":
        """With `num_tokens` of one more sequence from position `start`."""
        keys = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        if num_tokens == 1:
            return StepLoad(self.num_prefill_tokens, self.num_decodes + 1, self.num_keys_read + keys)
        return StepLoad(self.num_prefill_tokens + num_tokens, self.num_decodes, self.num_keys_read + keys)


class StepTimeModel:
    """seconds = a + b * tokens prefilled + c * sequences decoded + d * keys read, by recursive least squares that
    forgets what is a few hundred steps old. A step that takes far longer than expected counts as twice as long."""

    def __init__(self) -> None:
        size = len(_SCALES)
        self._weights = [0.0] * size
        self._covariance = [[_PRIOR * (i == j) for j in range(size)] for i in range(size)]
        self.num_steps = 0
        self.error_seconds_total = 0.0

    def __repr__(self) -> str:
        a, b, c, d = (weight / scale for weight, scale in zip(self._weights, _SCALES, strict=True))
        return f"StepTimeModel({self.num_steps} steps: {a:.2e} + {b:.2e} p + {c:.2e} d + {d:.2e} k seconds)"

    @property
    def is_fitted(self) -> bool:
        return self.num_steps >= _MIN_STEPS

    def predict_seconds(self, load: StepLoad) -> float:
        return sum(max(0.0, w) * x for w, x in zip(self._weights, _features(load), strict=True))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step of this load took so long."""
        expected = self.predict_seconds(load)
        if self.is_fitted:
            self.error_seconds_total += abs(seconds - expected)
            seconds = min(seconds, _OUTLIER * expected) if expected else seconds
        self.num_steps += 1
        x, p = _features(load), self._covariance
        px = [sum(p[i][j] * x[j] for j in range(len(x))) for i in range(len(x))]
        denominator = _FORGETTING + sum(x[i] * px[i] for i in range(len(x)))
        residual = seconds - sum(w * v for w, v in zip(self._weights, x, strict=True))
        self._weights = [w + v / denominator * residual for w, v in zip(self._weights, px, strict=True)]
        for i in range(len(x)):
            for j in range(len(x)):
                p[i][j] = (p[i][j] - px[i] * px[j] / denominator) / _FORGETTING
        largest = max(p[i][i] for i in range(len(x)))
        if largest > _PRIOR:  # steps that are all alike say nothing of the rest: keep it from growing without end
            self._covariance = [[value * _PRIOR / largest for value in row] for row in p]

    def max_prefill_tokens(self, load: StepLoad, start: int, target_seconds: float, limit: int) -> int:
        """How many tokens of one more sequence keep the step within its target, at most `limit`."""
        if not self.is_fitted:
            return limit
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.predict_seconds(load.plus(start, middle)) <= target_seconds:
                low = middle
            else:
                high = middle - 1
        return low


def _features(load: StepLoad) -> list[float]:
    parts = (1, load.num_prefill_tokens, load.num_decodes, load.num_keys_read)
    return [part / scale for part, scale in zip(parts, _SCALES, strict=True)]
