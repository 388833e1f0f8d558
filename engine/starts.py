"""Which waiting requests start in a step, in the room that those that run leave."""

from collections import Counter
from itertools import islice

from engine.admission import Admission
from engine.api import Decision
from engine.batch import ScheduledRow
from engine.cache.manager import KVCacheManager
from engine.config import EngineConfig
from engine.request import Request
from engine.seats import Seats
from engine.step_budget import StepBudget
from engine.waiting_queue import WaitingQueue

MAX_PROMISE_WAITS = 32
MAX_SQUEEZE_LOOKS = 16
NUM_REST_STEPS = 4


class Starts:
    """Adds a row to the step for each request that it starts."""

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCacheManager,
        waiting: WaitingQueue,
        admission: Admission,
        seats: Seats,
        decisions: Counter[Decision],
    ) -> None:
        self._config = config
        self._cache = cache
        self.waiting = waiting
        self.admission = admission
        self.seats = seats
        self._decisions = decisions
        self._num_rest_steps = 0
        self._changes = (0, 0)

    def admit(self, rows: list[ScheduledRow], budget: StepBudget, now: float, *, is_cool: bool) -> None:
        """Start waiting requests in order. Behind the first that finds no blocks only shorter ones may start, and no
        longer than ageing lets the first wait. While nobody comes or goes it is not tried again in each step."""
        changes = (self.waiting.num_added, self.seats.num_left)
        if self._num_rest_steps and self._changes == changes:
            self._num_rest_steps -= 1
            return
        running, policy = self.seats.running, self.waiting.policy
        lane = not any(request.has_lane for request in running)
        order = self.waiting.in_order(now, is_lane_free=lane, is_cool=is_cool)
        for place, request in enumerate(order):
            if not budget.has_prefill_room:
                return
            if self._waits(request) or self.admission.is_kept_out(request):
                continue
            if not self.admission.has_slot(request, running):
                return
            if self.start(request, budget, rows):
                if place == 0 and lane and policy.is_starving(request, now):
                    request.has_lane = True
                    self._decisions[Decision.STARVING] += 1
                continue
            if now - request.arrival_seconds < policy.ageing_seconds:
                self._squeeze_in(request, order[place + 1 :], budget, rows)
            self._changes, self._num_rest_steps = changes, NUM_REST_STEPS
            return

    def start(self, request: Request, budget: StepBudget, rows: list[ScheduledRow]) -> bool:
        """Start a waiting request if a slot and its blocks, and the future peak with it, fit."""
        if not self.seats.has_room:
            return False
        num_cached = self._cache.attach_prefix(request)
        num_new = budget.chunk(request, self._config.max_chunk(request.prefill_chunk))
        fits = num_new and self.admission.fits(request, self.seats.running)
        if not (fits and self._cache.allocate(request, num_new)):
            self._cache.release(request)
            return False
        num_loaded = self._cache.settle_prefix(request)
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            request.num_loaded_tokens = min(num_loaded, request.num_cached_tokens)
        self._cache.promise(request)
        self.waiting.remove(request)
        self.seats.enter(request)
        self._decisions[Decision.STARTED] += 1
        budget.take(request, num_new)
        rows.append(ScheduledRow.of(request, num_new))
        return True

    def _squeeze_in(self, head: Request, behind: list[Request], budget: StepBudget, rows: list[ScheduledRow]) -> None:
        """Start what is shorter than the head and fits although the head does not."""
        for request in islice(behind, MAX_SQUEEZE_LOOKS):
            if not (budget.has_prefill_room and self.admission.has_slot(request, self.seats.running)):
                return
            if self._num_tokens_at_end(request) >= self._num_tokens_at_end(head) or self._waits(request):
                continue
            if self.start(request, budget, rows):
                self._decisions[Decision.SQUEEZED_IN] += 1

    def _num_tokens_at_end(self, request: Request) -> int:
        return request.num_tokens + self.waiting.lengths.remaining_tokens(request)

    def _waits(self, request: Request) -> bool:
        if request.num_promise_waits >= MAX_PROMISE_WAITS or not self._cache.waits_for_promise(request):
            return False
        request.num_promise_waits += 1
        return True
