"""Who is on the device: the running requests, each in a slot of its own."""

from engine.cache.manager import KVCacheManager
from engine.request import Request, RequestStatus


class Seats:
    """`running` is in the order in which they came. `num_left` counts those that went, ever."""

    def __init__(self, cache: KVCacheManager, num_slots: int) -> None:
        self.running: list[Request] = []
        self.num_left = 0
        self._cache = cache
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def has_room(self) -> bool:
        return bool(self._free_slots)

    def enter(self, request: Request) -> None:
        request.tail_slot = self._free_slots.pop()
        request.move(RequestStatus.RUNNING)
        self.running.append(request)

    def leave(self, request: Request) -> None:
        """Its slot is free and its blocks are released; what becomes of it is the caller's."""
        assert request.tail_slot is not None, f"{request!r} runs without a tail slot"
        self.running.remove(request)
        self.num_left += 1
        self._free_slots.append(request.tail_slot)
        request.tail_slot = None
        self._cache.release(request)

    def check(self) -> None:
        assert all(r.status is RequestStatus.RUNNING and r.tail_slot is not None for r in self.running), self.running
        slots = [*self._free_slots, *(r.tail_slot for r in self.running)]
        assert sorted(s for s in slots if s is not None) == list(range(self._num_slots)), "a tail slot is lost"
