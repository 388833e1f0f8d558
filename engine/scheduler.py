"""Which tokens of which requests the next step runs: one synchronous decision, without a tensor or a clock."""

from collections import Counter
from collections.abc import Iterable

from engine.admission import Admission
from engine.api import Decision, FinishReason
from engine.batch import SampledRow, ScheduledBatch, ScheduledRow
from engine.cache.manager import KVCacheManager
from engine.config import EngineConfig
from engine.errors import CacheStoreFullError
from engine.fairness import TenantCounters
from engine.loads import Loads
from engine.long_lane import LongLane
from engine.outcomes import Outcomes
from engine.policy import PriorityPolicy
from engine.predictors import OutputLengthPredictor
from engine.preemption import Preemption
from engine.request import Request, RequestStatus
from engine.seats import Seats
from engine.starts import Starts
from engine.step_budget import StepBudget
from engine.step_result import StepResult
from engine.step_time import StepTimeModel
from engine.thermal import Heat, ThermalGovernor
from engine.urgent import UrgentPrompts
from engine.waiting_queue import WaitingQueue


class Scheduler:
    """A token budget per step: running requests first, then waiting ones; a decode is a request with one token to run.

    Allocation is never optimistic: on shortage the least urgent, latest request is preempted and recomputed later, so
    the most urgent, earliest one always advances. Whoever decodes has its token
    in every step but those that urgent prompts have for themselves.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCacheManager,
        *,
        policy: PriorityPolicy | None = None,
        lengths: OutputLengthPredictor | None = None,
        governor: ThermalGovernor | None = None,
    ) -> None:
        self.config = config
        self.cache = cache
        self.policy = policy or PriorityPolicy()
        self.lengths = lengths or OutputLengthPredictor()
        self.governor = governor
        self.step_times = StepTimeModel()
        self.tenants = TenantCounters()
        self._seats = Seats(cache, config.max_num_seqs)
        self.waiting = WaitingQueue(self.policy, self.tenants, self.lengths)
        self.loads = Loads(cache, self.waiting)
        self.decisions: Counter[Decision] = Counter()
        self.lane = LongLane(config, cache, self.policy, self.lengths, self.loads)
        self._admission = Admission(config, cache, self.lengths, self.lane)
        self._preemption = Preemption(config, self.policy, self._admission)
        self._starts = Starts(config, cache, self.waiting, self._admission, self._seats, self.decisions)
        self.ended = StepResult()
        self._urgent = UrgentPrompts(config, cache, self._starts, self.decisions)
        self._outcomes = Outcomes(config, cache, self, self.tenants, self.lengths, self.decisions)
        self._num_batches = 0

    def __repr__(self) -> str:
        counts = f"running={len(self.running)}, waiting={len(self.waiting)}, loading={len(self.loads)}"
        return f"Scheduler({counts}, {self.cache.pool!r})"

    @property
    def num_preemptions(self) -> int:
        """Of all causes."""
        return sum(self.decisions[why] for why in Decision if why.startswith("preempted"))

    @property
    def running(self) -> list[Request]:
        return self._seats.running

    @property
    def on_device(self) -> list[Request]:
        """All that hold a slot, whoever is in the lane of long sequences included."""
        return self.running if self.lane.request is None else [*self.running, self.lane.request]

    def add(self, request: Request) -> None:
        self._queue(request)
        self.tenants.entered(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state between two steps; its blocks become free or cached."""
        if request.status is RequestStatus.FINISHED:
            return
        if self.lane.is_long(request):
            self.lane.remove(request)
            self.cache.release(request)
        elif request.status is RequestStatus.RUNNING:
            self._seats.leave(request)
        elif request.status is RequestStatus.LOADING:
            self.loads.remove(request)
        else:
            self.waiting.remove(request)
        self.cache.cancel_load(request.request_id)
        self.tenants.left(request)
        request.finish_reason = reason
        request.move(RequestStatus.FINISHED)

    def preempt(self, request: Request, why: Decision = Decision.PREEMPTED_FOR_BLOCKS) -> None:
        """Take a running request off the device; it waits again, and what the cold tier does not keep is recomputed."""
        if request is self.lane.request:
            self.lane.leave()
            self.cache.release(request)
        else:
            self.cache.swap_out(request)
            self._seats.leave(request)
        request.num_preemptions += 1
        request.num_loads = 0
        request.num_tokens_when_preempted = request.num_tokens
        request.has_lane = False
        self.decisions[why] += 1
        request.move(RequestStatus.PREEMPTED)
        request.move(RequestStatus.WAITING)
        self._queue(request)

    def _queue(self, request: Request) -> None:
        (self.lane if self.lane.is_long(request) else self.waiting).add(request)

    def schedule(self, now: float) -> ScheduledBatch:
        """Plan a step. `now` is monotonic seconds; an empty batch means that there is nothing to do."""
        self._urgent.begin_step()
        rows: list[ScheduledRow] = []
        self.loads.take_landed()
        if self.lane.gives_way(self.waiting, now) and self.lane.request is not None:
            self.preempt(self.lane.request, Decision.PREEMPTED_FROM_LANE)
        self.lane.admit(self.running, self.waiting, now)
        is_lane_due = self.lane.is_due(now)
        self.loads.start(now, self.config.max_num_seqs - len(self.running))
        self._make_room_for_urgent(now)
        suspects = [request for request in (*self.running, *self.waiting) if request.num_failed_steps]
        suspect = min(suspects, key=lambda request: self.policy.key(request, now), default=None)
        if suspect is not None and suspect.status is RequestStatus.WAITING:
            for victim in self._preemption.for_suspect(suspect, self.running, now):
                self.preempt(victim, Decision.PREEMPTED_AFTER_FAILURE)
        if suspect is None and self._urgent.go_first(now) and (urgent := self._urgent.rows(now)):
            return self._batch(urgent)
        max_tokens = self._max_step_tokens(now)
        if suspect is None and is_lane_due and (long := self._lane_rows(max_tokens, now)):
            return self._batch(long)
        budget = StepBudget(
            max_tokens,
            [request for request in self.running if request.is_decoding],
            step_times=self.step_times,
            target_seconds=self.config.inter_token_target_seconds,
            least_tokens=self.config.block_size,
        )
        for request in self.policy.order(self.running, now):
            if request.status is RequestStatus.RUNNING and suspect in (None, request):
                self._schedule_running(request, budget, rows, now)
        if suspect is None:
            is_cool = self.governor is None or self.governor.heat is Heat.COOL
            self._starts.admit(rows, budget, now, is_cool=is_cool)
        elif not rows:
            self._starts.start(suspect, budget, rows)
        self.decisions[Decision.PREFILL_BOUNDED] += budget.num_bounded
        return self._batch(rows or self._lane_rows(max_tokens, now))

    def _lane_rows(self, max_tokens: int, now: float) -> list[ScheduledRow]:
        """The step of the sequence that is larger than the memory, if it is in the lane and can go on."""
        request = self.lane.request
        if request is None:
            return []
        try:
            row = self.lane.step(min(self.config.max_chunk(request.prefill_chunk), max_tokens), now)
        except CacheStoreFullError as error:
            self.finish(request, FinishReason.ERROR)
            self.ended.fail(request, str(error))
            return []
        return [] if row is None else [row]

    @property
    def wants_to_interrupt(self) -> bool:
        return self._urgent.are_waiting

    def interrupt(self, parked: ScheduledBatch, now: float) -> ScheduledBatch:
        """Plan a step inside another one, which stays parked until `resume`: urgent prefill only, first token included.

        The rows of the parked step keep all that they have. An empty batch means that no urgent request finds room.
        """
        self._urgent.parked = frozenset(row.request_id for row in parked.rows)
        self.cache.park_step()
        self._make_room_for_urgent(now)
        return self._batch(self._urgent.rows(now))

    def resume(self) -> None:
        """The step that ran inside has ended, or was empty; the parked one goes on."""
        self.cache.resume_step()
        self._urgent.parked = frozenset()

    def update(self, batch: ScheduledBatch, sampled: Iterable[SampledRow]) -> StepResult:
        """The step succeeded: commit its blocks, append its tokens, end what is complete."""
        return self._outcomes.update(batch, sampled)

    def discard(
        self, batch: ScheduledBatch, message: str, *, out_of_memory: bool = False, is_final: bool = False
    ) -> StepResult:
        """The step failed: nothing it wrote is kept. Its requests run again alone; one that fails alone ends, and all
        of them where it `is_final`. Where memory was short they run again together, with half the chunks."""
        return self._outcomes.discard(batch, message, out_of_memory=out_of_memory, is_final=is_final)

    def _schedule_running(self, request: Request, budget: StepBudget, rows: list[ScheduledRow], now: float) -> None:
        """Add one running request to the step, preempting others if it must."""
        num_new = budget.chunk(request, self.config.max_chunk(request.prefill_chunk))
        if num_new < 1:
            return
        num_missing = self.cache.num_missing_blocks(request, num_new)
        while not (
            self._admission.may_take(request, num_missing, self.running) and self.cache.allocate(request, num_new)
        ):
            if self.loads.cancel_latest():
                continue
            scheduled = self._urgent.parked.union(row.request_id for row in rows)
            victim = self._preemption.for_blocks(self.running, scheduled, now)
            self.preempt(victim)
            if victim is request:
                return
        budget.take(request, num_new)
        rows.append(ScheduledRow.of(request, num_new))

    def _make_room_for_urgent(self, now: float) -> None:
        urgent = self.waiting.urgent(now) if self.waiting.num_urgent else []
        for victim in self._preemption.for_urgent(urgent, self.running, self._urgent.parked):
            self.preempt(victim, Decision.PREEMPTED_FOR_URGENT)

    def _max_step_tokens(self, now: float) -> int:
        """Of a step at this temperature; a token for each running answer is in it at any."""
        if self.governor is None:
            return self.config.max_num_batched_tokens
        self.governor.look(now)
        self.decisions[Decision.HEAT_BOUNDED] += self.governor.heat is not Heat.COOL
        return max(self.config.max_num_seqs, int(self.governor.budget_share * self.config.max_num_batched_tokens))

    def _batch(self, rows: list[ScheduledRow]) -> ScheduledBatch:
        self._num_batches += 1
        return ScheduledBatch(rows, self._num_batches)

    def check(self) -> None:
        """States, lists, slots and block references agree."""
        self.cache.check()
        self._seats.check()
        assert all(r.status is RequestStatus.WAITING and not r.blocks for r in self.waiting), self.waiting
        self.loads.check()
        self.lane.check()
        self.cache.check_readers(self.on_device)
