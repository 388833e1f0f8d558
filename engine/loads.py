"""Requests that wait for blocks of theirs to come from the cold tier. They hold no slot and stop no step."""

from engine.cache.cost import GateDecision
from engine.cache.manager import KVCacheManager
from engine.request import Request, RequestStatus
from engine.waiting_queue import WaitingQueue

MAX_LOADS = 2
"""How often one start of a request may wait for the cold tier; what has landed may be evicted before it is used."""


class Loads:
    """Moves requests from the waiting queue to LOADING and back, when what they load has landed or is taken back."""

    def __init__(self, cache: KVCacheManager, waiting: WaitingQueue) -> None:
        self._cache = cache
        self._waiting = waiting
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def remove(self, request: Request) -> None:
        """Raises KeyError for one that does not load."""
        del self._requests[request.request_id]

    def take_landed(self) -> None:
        for owner in self._cache.take_landed():
            self._back_to_waiting(owner)

    def start(self, now: float, num_free_slots: int) -> None:
        """Fetch what the cold tier has of waiting requests' prefixes, while they wait and while others run. Those that
        no slot is free for load within a bound only."""
        if self._cache.cold is None:
            return
        for position, request in enumerate(self._waiting.in_order(now, is_lane_free=False)):
            if request.num_loads >= MAX_LOADS:
                continue
            decision = self._cache.start_load(request, may_start=position + len(self) < max(1, num_free_slots))
            if decision is GateDecision.LOAD:
                request.num_loads += 1
                self._waiting.remove(request)
                request.move(RequestStatus.LOADING)
                self._requests[request.request_id] = request
            elif decision is GateDecision.SHORTAGE:
                return  # nobody behind overtakes it
            else:
                request.num_loads = MAX_LOADS

    def cancel_latest(self) -> bool:
        """Blocks that running requests need are taken from loads first; False if none is on its way."""
        owner = None if self._cache.cold is None else self._cache.cold.latest_owner()
        if owner is None:
            return False
        self._cache.cancel_load(owner)
        self._back_to_waiting(owner)
        return True

    def _back_to_waiting(self, owner: str) -> None:
        request = self._requests.pop(owner, None)
        if request is not None:
            request.move(RequestStatus.WAITING)
            self._waiting.add(request)

    def check(self) -> None:
        loading = self._requests.values()
        assert all(r.status is RequestStatus.LOADING and not r.blocks for r in loading), self._requests
