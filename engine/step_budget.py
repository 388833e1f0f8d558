"""What a step may still take while it is being planned: tokens, and the time that running streams leave to prefill."""

from collections.abc import Sequence

from engine.api import PriorityClass
from engine.request import Request
from engine.step_time import StepLoad, StepTimeModel


class StepBudget:
    """A token is kept for every running sequence that decodes, so prefill never stops one.

    With a target, the prefill of requests that are not urgent ends where the step would take longer, as long as
    somebody decodes; the first of them has at least `least_tokens`, so it gets on.
    """

    def __init__(
        self,
        max_tokens: int,
        decoding: Sequence[Request] = (),
        *,
        step_times: StepTimeModel | None = None,
        target_seconds: float | None = None,
        least_tokens: int = 1,
    ) -> None:
        self.num_tokens_left = max_tokens
        self.num_bounded = 0
        self._num_decodes_left = len(decoding)
        self._step_times = step_times
        self._target = target_seconds if decoding else None
        self._least = least_tokens
        self._load = StepLoad(0, len(decoding), sum(request.num_tokens for request in decoding))

    @property
    def has_prefill_room(self) -> bool:
        return self.num_tokens_left > self._num_decodes_left

    def chunk(self, request: Request, max_chunk: int) -> int:
        """Tokens of the request in this step, 0 where there is no room."""
        if request.is_decoding:
            return min(1, self.num_tokens_left)
        size = max(0, min(request.num_uncomputed_tokens, max_chunk, self.num_tokens_left - self._num_decodes_left))
        if self._target is None or self._step_times is None or request.priority is PriorityClass.URGENT:
            return size
        least = 0 if self._load.num_prefill_tokens else self._least
        bound = self._step_times.max_prefill_tokens(self._load, request.num_computed_tokens, self._target, size)
        self.num_bounded += bound < size
        return min(size, max(bound, least))

    def take(self, request: Request, num_tokens: int) -> None:
        """The step runs these tokens."""
        self.num_tokens_left -= num_tokens
        if request.is_decoding:
            self._num_decodes_left = max(0, self._num_decodes_left - 1)
        else:
            self._load = self._load.plus(request.num_computed_tokens, num_tokens)
