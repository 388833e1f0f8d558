"""How tokens of one request are chosen, in the field's own names (OpenAI and vLLM). Validated when built."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.errors import InvalidRequestError

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request. `temperature` 0 is greedy; `top_k` None is off; `logprobs` None is off.

    Raises InvalidRequestError that names the field for a value out of range, NaN included.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not math.isfinite(value) or not low <= value <= high:
                raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}", param=name)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be above 0", param="top_p")
        if self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidRequestError(f"top_k must be at least 1, got {self.top_k}", param="top_k")
        if not 1 <= self.n <= 16:
            raise InvalidRequestError(f"n must be between 1 and 16, got {self.n}", param="n")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise InvalidRequestError(f"logprobs must be between 0 and 20, got {self.logprobs}", param="logprobs")
        if any(not math.isfinite(bias) for bias in self.logit_bias.values()):
            raise InvalidRequestError("logit_bias values must be finite", param="logit_bias")
