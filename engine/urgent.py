"""Which urgent prompts run before their turn: in a step of their own, or inside one that is parked."""

from collections import Counter

from engine.api import Decision, PriorityClass
from engine.batch import ScheduledRow
from engine.cache.manager import KVCacheManager
from engine.config import EngineConfig
from engine.request import Request, RequestStatus
from engine.starts import Starts
from engine.step_budget import StepBudget


class UrgentPrompts:
    """Plans their prefill, first token included, where it finds room without a victim."""

    def __init__(
        self, config: EngineConfig, cache: KVCacheManager, starts: Starts, decisions: Counter[Decision]
    ) -> None:
        self.parked: frozenset[str] = frozenset()
        self._config = config
        self._cache = cache
        self._starts = starts
        self._decisions = decisions
        self._inside: list[Request] = []
        self._were_alone = False

    def begin_step(self) -> None:
        """A step is planned that nobody runs inside yet."""
        self._inside.clear()

    @property
    def are_waiting(self) -> bool:
        """Whether one that waits, or has begun inside this step, has no first token yet. Cheap, since it is asked
        between any two segments."""
        return self._starts.waiting.num_urgent > 0 or any(
            r.status is RequestStatus.RUNNING and not r.is_decoding and not r.num_failed_steps for r in self._inside
        )

    def go_first(self, now: float) -> bool:
        """Whether those that came between two steps have one for themselves, as those have that come in one, instead
        of sharing it with other prefill; never two steps running, so the others get on."""
        waiting, running = self._starts.waiting, self._starts.seats.running
        wait = self._config.enable_interrupts and waiting.num_urgent > 0
        others = any(r.priority is not PriorityClass.URGENT and not r.is_decoding for r in running)
        others = others or len(waiting) > waiting.num_urgent
        starving = wait and any(waiting.policy.is_starving(request, now) for request in waiting)
        self._were_alone = wait and others and not starving and not self._were_alone
        return self._were_alone

    def rows(self, now: float) -> list[ScheduledRow]:
        """Those that have begun, then those that wait."""
        rows: list[ScheduledRow] = []
        budget, waiting = StepBudget(self._config.max_num_batched_tokens), self._starts.waiting
        for request in waiting.policy.order(self._starts.seats.running, now):
            if _may_interrupt(request) and not request.is_decoding and request.request_id not in self.parked:
                self._go_on(request, budget, rows)
        for request in waiting.urgent(now):
            if _may_interrupt(request) and self._starts.start(request, budget, rows):
                self._decisions[Decision.INTERRUPTED] += 1
                self._inside.append(request)
        return rows

    def _go_on(self, request: Request, budget: StepBudget, rows: list[ScheduledRow]) -> None:
        num_new = budget.chunk(request, self._config.max_chunk(request.prefill_chunk))
        num_missing = self._cache.num_missing_blocks(request, num_new)
        may_take = self._starts.admission.may_take(request, num_missing, self._starts.seats.running)
        if num_new and may_take and self._cache.allocate(request, num_new):
            budget.take(request, num_new)
            rows.append(ScheduledRow.of(request, num_new))


def _may_interrupt(request: Request) -> bool:
    """One whose step has failed has to run alone."""
    return request.priority is PriorityClass.URGENT and not request.num_failed_steps
