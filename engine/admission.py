"""Whether a request may start beside those that run: slots, blocks until everybody has finished, what is kept back."""

from collections.abc import Sequence

from engine.api import PriorityClass
from engine.cache.manager import KVCacheManager
from engine.config import EngineConfig
from engine.future_peak import future_peak_blocks
from engine.long_lane import LongLane
from engine.predictors import OutputLengthPredictor
from engine.request import Request


class Admission:
    """Some slots and blocks are kept for urgent requests; a request that runs alone may have them all, since what can
    never run is refused before it comes here. The window of the lane of long sequences is nobody else's."""

    def __init__(
        self, config: EngineConfig, cache: KVCacheManager, lengths: OutputLengthPredictor, lane: LongLane
    ) -> None:
        self._lane = lane
        self._config = config
        self._cache = cache
        self._lengths = lengths

    def has_slot(self, request: Request, running: Sequence[Request]) -> bool:
        num_kept = 0
        if running and request.priority is not PriorityClass.URGENT:
            num_kept = max(0, self._config.urgent_reserved_seqs - _num_urgent(running))
        return len(running) + num_kept < self._config.max_num_seqs

    def is_kept_out(self, request: Request) -> bool:
        """Whether it waits for the lane of long sequences, whatever room there is; who comes after it does not."""
        return self._lane.keeps_large_out and self._lane.is_large(request)

    def fits(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether the predicted lengths keep the cache within its size until everybody has finished."""
        if self.is_kept_out(request):
            return False
        num_reserved = self._lane.num_reserved_blocks
        if not running:
            return True
        peak = future_peak_blocks([*running, request], self._cache, self._lengths)
        return peak + num_reserved + self._num_kept_blocks(request, running) <= self._config.num_blocks

    def may_take(self, request: Request, num_blocks: int, running: Sequence[Request]) -> bool:
        """Whether a running request may take so many more blocks now."""
        if not num_blocks:
            return True
        num_kept = self._num_kept_blocks(request, running) if len(running) > 1 else 0
        return num_blocks + num_kept + self._lane.num_unfilled_blocks <= self._cache.pool.num_free

    def _num_kept_blocks(self, request: Request, running: Sequence[Request]) -> int:
        if request.priority is PriorityClass.URGENT or not self._config.urgent_reserved_blocks:
            return 0
        num_held = sum(len(r.blocks) for r in running if r.priority is PriorityClass.URGENT)
        return max(0, self._config.urgent_reserved_blocks - num_held)


def _num_urgent(running: Sequence[Request]) -> int:
    return sum(request.priority is PriorityClass.URGENT for request in running)
