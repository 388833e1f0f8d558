"""Which tokens of which requests the next step runs: one synchronous decision, without a tensor or a clock."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from engine.admission import Admission
from engine.api import Decision, FinishReason, PriorityClass
from engine.batch import SampledRow, ScheduledBatch, ScheduledRow
from engine.cache.manager import KVCacheManager
from engine.config import EngineConfig
from engine.fairness import TenantCounters
from engine.loads import Loads
from engine.policy import PriorityPolicy
from engine.predictors import OutputLengthPredictor
from engine.preemption import Preemption
from engine.request import Request, RequestStatus
from engine.step_budget import StepBudget
from engine.step_time import StepTimeModel
from engine.thermal import Heat, ThermalGovernor
from engine.waiting_queue import WaitingQueue

MAX_PROMISE_WAITS = 32
MAX_FAILED_STEPS = 2
MAX_SQUEEZE_LOOKS = 16
NUM_REST_STEPS = 4


@dataclass(slots=True)
class StepResult:
    """What an update changed: requests that got a token, requests that ended, and errors by request id."""

    advanced: list[tuple[Request, SampledRow]] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


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
        self.running: list[Request] = []
        self.waiting = WaitingQueue(self.policy, self.tenants, self.lengths)
        self.loads = Loads(cache, self.waiting)
        self.decisions: Counter[Decision] = Counter()
        self._admission = Admission(config, cache, self.lengths)
        self._preemption = Preemption(config, self.policy, self._admission)
        self._tail_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._scheduled: dict[str, int] = {}
        self._parked: frozenset[str] = frozenset()
        self._inside: list[Request] = []
        self._num_batches = 0
        self._num_left = 0
        self._was_urgent_alone = False
        self._num_rest_steps = 0
        self._changes = (0, 0)

    def __repr__(self) -> str:
        counts = f"running={len(self.running)}, waiting={len(self.waiting)}, loading={len(self.loads)}"
        return f"Scheduler({counts}, {self.cache.pool!r})"

    @property
    def num_preemptions(self) -> int:
        """Of all causes."""
        return sum(self.decisions[why] for why in Decision if why.startswith("preempted"))

    def add(self, request: Request) -> None:
        self.waiting.add(request)
        self.tenants.entered(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state between two steps; its blocks become free or cached."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._vacate(request)
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
        self.running.remove(request)
        self.cache.swap_out(request)
        self._vacate(request)
        request.num_preemptions += 1
        request.num_loads = 0
        request.num_tokens_when_preempted = request.num_tokens
        request.has_lane = False
        self.decisions[why] += 1
        request.move(RequestStatus.PREEMPTED)
        request.move(RequestStatus.WAITING)
        self.waiting.add(request)

    def schedule(self, now: float) -> ScheduledBatch:
        """Plan a step. `now` is monotonic seconds; an empty batch means that there is nothing to do."""
        self._scheduled = {}
        self._inside.clear()
        rows: list[ScheduledRow] = []
        self.loads.take_landed()
        self.loads.start(now, self.config.max_num_seqs - len(self.running))
        self._make_room_for_urgent(now)
        suspects = [request for request in (*self.running, *self.waiting) if request.num_failed_steps]
        suspect = min(suspects, key=lambda request: self.policy.key(request, now), default=None)
        if suspect is not None and suspect.status is RequestStatus.WAITING:
            for victim in self._preemption.for_suspect(suspect, self.running, now):
                self.preempt(victim, Decision.PREEMPTED_AFTER_FAILURE)
        if suspect is None and self._urgent_goes_first(now) and (urgent := self._urgent_rows(now)):
            return self._batch(urgent)
        budget = StepBudget(
            self._max_step_tokens(now),
            [request for request in self.running if request.is_decoding],
            step_times=self.step_times,
            target_seconds=self.config.inter_token_target_seconds,
            least_tokens=self.config.block_size,
        )
        for request in self.policy.order(self.running, now):
            if request.status is RequestStatus.RUNNING and suspect in (None, request):
                self._schedule_running(request, budget, rows, now)
        if suspect is None:
            self._admit(rows, budget, now)
        elif not rows:
            self._start(suspect, budget, rows)
        self.decisions[Decision.PREFILL_BOUNDED] += budget.num_bounded
        return self._batch(rows)

    @property
    def wants_to_interrupt(self) -> bool:
        """Whether an urgent request that waits, or has begun inside this step, has no first token yet. Cheap, since it
        is asked between any two segments."""
        return self.waiting.num_urgent > 0 or any(
            r.status is RequestStatus.RUNNING and not r.is_decoding and not r.num_failed_steps for r in self._inside
        )

    def interrupt(self, parked: ScheduledBatch, now: float) -> ScheduledBatch:
        """Plan a step inside another one, which stays parked until `resume`: urgent prefill only, first token included.

        The rows of the parked step keep all that they have. An empty batch means that no urgent request finds room.
        """
        self._scheduled = {row.request_id: len(row.token_ids) for row in parked.rows}
        self._parked = frozenset(self._scheduled)
        self.cache.park_step()
        self._make_room_for_urgent(now)
        return self._batch(self._urgent_rows(now))

    def _urgent_goes_first(self, now: float) -> bool:
        """Whether urgent prompts that came between two steps have one for themselves, as those have that come in one,
        instead of sharing it with other prefill; never two steps running, so the others get on."""
        waits = self.config.enable_interrupts and self.waiting.num_urgent > 0
        others = any(r.priority is not PriorityClass.URGENT and not r.is_decoding for r in self.running)
        others = others or len(self.waiting) > self.waiting.num_urgent
        starving = waits and any(self.policy.is_starving(request, now) for request in self.waiting)
        self._was_urgent_alone = waits and others and not starving and not self._was_urgent_alone
        return self._was_urgent_alone

    def _urgent_rows(self, now: float) -> list[ScheduledRow]:
        """The prefill of urgent requests that have no first token yet, where it finds room without a victim."""
        rows: list[ScheduledRow] = []
        budget = StepBudget(self.config.max_num_batched_tokens)
        for request in self.policy.order(self.running, now):
            begun = _may_interrupt(request) and not request.is_decoding and request.request_id not in self._parked
            if begun and self._finds_blocks(request, budget):
                self._schedule_running(request, budget, rows, now)
        for request in self.waiting.urgent(now):
            if _may_interrupt(request) and self._start(request, budget, rows):
                self.decisions[Decision.INTERRUPTED] += 1
                self._inside.append(request)
        return rows

    def resume(self) -> None:
        """The step that ran inside has ended, or was empty; the parked one goes on."""
        self.cache.resume_step()
        self._scheduled = dict.fromkeys(self._parked, 0)
        self._parked = frozenset()

    def update(self, batch: ScheduledBatch, sampled: Iterable[SampledRow]) -> StepResult:
        """The step succeeded: commit its blocks, append its tokens, end what is complete."""
        self.cache.commit_step()
        by_id = {request.request_id: request for request in self.running}
        for row in batch.rows:
            request = by_id[row.request_id]
            request.num_computed_tokens += len(row.token_ids)
            request.num_failed_steps = 0
            self.tenants.charge(request, len(row.token_ids))
            if request.num_computed_tokens >= request.num_prompt_tokens:
                self.cache.withdraw_promises(request)
        result = StepResult()
        for token in sampled:
            request = by_id[token.request_id]
            if token.token_id is None:
                result.errors[request.request_id] = token.error or "the token could not be chosen"
                self.finish(request, FinishReason.ERROR)
                result.finished.append(request)
                continue
            request.output_token_ids.append(token.token_id)
            result.advanced.append((request, token))
            reason = request.reason_to_finish(token.token_id, self.config.max_model_len)
            if reason is not None:
                self.lengths.observe(request)
                self.finish(request, reason)
                result.finished.append(request)
        return result

    def discard(self, batch: ScheduledBatch, message: str, *, out_of_memory: bool = False) -> StepResult:
        """The step failed: nothing it wrote is kept. Its requests run again alone; one that fails alone ends. Where
        memory was short they run again together, with half the chunks."""
        self.cache.discard_step()
        result = StepResult()
        by_id = {request.request_id: request for request in self.running}
        halved = 0
        if out_of_memory:
            halved = sum(self._halve_chunk(by_id[row.request_id], len(row.token_ids)) for row in batch.rows)
        self.decisions[Decision.CHUNK_HALVED] += halved
        for row in batch.rows:
            request = by_id[row.request_id]
            request.num_failed_steps += not halved
            if len(batch.rows) == 1 and request.num_failed_steps >= MAX_FAILED_STEPS:
                result.errors[request.request_id] = message
                self.finish(request, FinishReason.ERROR)
                result.finished.append(request)
            else:
                self.preempt(request, Decision.PREEMPTED_AFTER_FAILURE)
        return result

    def _halve_chunk(self, request: Request, num_tokens: int) -> bool:
        """Not below a block: what has no room for that fails."""
        if num_tokens <= self.config.block_size:
            return False
        request.prefill_chunk = max(self.config.block_size, num_tokens // 2)
        return True

    def _schedule_running(self, request: Request, budget: StepBudget, rows: list[ScheduledRow], now: float) -> None:
        """Add one running request to the step, preempting others if it must."""
        num_new = budget.chunk(request, self._max_chunk(request))
        if num_new < 1:
            return
        num_missing = self.cache.num_missing_blocks(request, num_new)
        while not (
            self._admission.may_take(request, num_missing, self.running) and self.cache.allocate(request, num_new)
        ):
            if self.loads.cancel_latest():
                continue
            victim = self._preemption.for_blocks(self.running, self._scheduled, now)
            self.preempt(victim)
            if victim is request:
                return
        budget.take(request, num_new)
        rows.append(self._row(request, num_new))

    def _admit(self, rows: list[ScheduledRow], budget: StepBudget, now: float) -> None:
        """Start waiting requests in order. Behind the first that finds no blocks only shorter ones may start, and no
        longer than ageing lets the first wait. While nobody comes or goes it is not tried again in each step."""
        if self._num_rest_steps and self._changes == (self.waiting.num_added, self._num_left):
            self._num_rest_steps -= 1
            return
        lane = not any(request.has_lane for request in self.running)
        is_cool = self.governor is None or self.governor.heat is Heat.COOL
        order = self.waiting.in_order(now, is_lane_free=lane, is_cool=is_cool)
        for place, request in enumerate(order):
            if not budget.has_prefill_room:
                return
            if self._waits(request):
                continue
            if not self._admission.has_slot(request, self.running):
                return
            if self._start(request, budget, rows):
                if place == 0 and lane and self.policy.is_starving(request, now):
                    request.has_lane = True
                    self.decisions[Decision.STARVING] += 1
                continue
            if now - request.arrival_seconds < self.policy.ageing_seconds:
                self._squeeze_in(request, order[place + 1 :], budget, rows)
            self._changes, self._num_rest_steps = (self.waiting.num_added, self._num_left), NUM_REST_STEPS
            return

    def _squeeze_in(self, head: Request, behind: list[Request], budget: StepBudget, rows: list[ScheduledRow]) -> None:
        """Start what is shorter than the head and fits although the head does not."""
        for request in islice(behind, MAX_SQUEEZE_LOOKS):
            if not (budget.has_prefill_room and self._admission.has_slot(request, self.running)):
                return
            if self._num_tokens_at_end(request) >= self._num_tokens_at_end(head) or self._waits(request):
                continue
            if self._start(request, budget, rows):
                self.decisions[Decision.SQUEEZED_IN] += 1

    def _num_tokens_at_end(self, request: Request) -> int:
        return request.num_tokens + self.lengths.remaining_tokens(request)

    def _waits(self, request: Request) -> bool:
        if request.num_promise_waits >= MAX_PROMISE_WAITS or not self.cache.waits_for_promise(request):
            return False
        request.num_promise_waits += 1
        return True

    def _make_room_for_urgent(self, now: float) -> None:
        urgent = self.waiting.urgent(now) if self.waiting.num_urgent else []
        for victim in self._preemption.for_urgent(urgent, self.running, self._parked):
            self.preempt(victim, Decision.PREEMPTED_FOR_URGENT)

    def _start(self, request: Request, budget: StepBudget, rows: list[ScheduledRow]) -> bool:
        """Start a waiting request if a slot and its blocks, and the future peak with it, fit."""
        if not self._tail_slots:
            return False
        num_cached = self.cache.attach_prefix(request)
        num_new = budget.chunk(request, self._max_chunk(request))
        if not (num_new and self._admission.fits(request, self.running) and self.cache.allocate(request, num_new)):
            self.cache.release(request)
            return False
        num_loaded = self.cache.settle_prefix(request)
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            request.num_loaded_tokens = min(num_loaded, request.num_cached_tokens)
        self.cache.promise(request)
        self.waiting.remove(request)
        request.tail_slot = self._tail_slots.pop()
        request.move(RequestStatus.RUNNING)
        self.running.append(request)
        self.decisions[Decision.STARTED] += 1
        budget.take(request, num_new)
        rows.append(self._row(request, num_new))
        return True

    def _max_step_tokens(self, now: float) -> int:
        """Of a step at this temperature; a token for each running answer is in it at any."""
        if self.governor is None:
            return self.config.max_num_batched_tokens
        self.governor.look(now)
        self.decisions[Decision.HEAT_BOUNDED] += self.governor.heat is not Heat.COOL
        return max(self.config.max_num_seqs, int(self.governor.budget_share * self.config.max_num_batched_tokens))

    def _max_chunk(self, request: Request) -> int:
        return min(request.prefill_chunk or self.config.prefill_chunk_size, self.config.max_num_batched_tokens)

    def _finds_blocks(self, request: Request, budget: StepBudget) -> bool:
        """Whether a running request's next chunk finds its blocks without a victim."""
        num_new = budget.chunk(request, self._max_chunk(request))
        return self.cache.num_missing_blocks(request, num_new) <= self.cache.pool.num_free

    def _batch(self, rows: list[ScheduledRow]) -> ScheduledBatch:
        self._num_batches += 1
        return ScheduledBatch(rows, self._num_batches)

    def _row(self, request: Request, num_new: int) -> ScheduledRow:
        self._scheduled[request.request_id] = num_new
        return ScheduledRow.of(request, num_new)

    def _vacate(self, request: Request) -> None:
        self._num_left += 1
        assert request.tail_slot is not None, f"{request!r} runs without a tail slot"
        self._tail_slots.append(request.tail_slot)
        request.tail_slot = None
        self.cache.release(request)

    def check(self) -> None:
        """States, lists, slots and block references agree."""
        self.cache.check()
        assert all(r.status is RequestStatus.RUNNING and r.tail_slot is not None for r in self.running), self.running
        assert all(r.status is RequestStatus.WAITING and not r.blocks for r in self.waiting), self.waiting
        self.loads.check()
        slots = [*self._tail_slots, *(r.tail_slot for r in self.running)]
        assert sorted(s for s in slots if s is not None) == list(range(self.config.max_num_seqs)), "a tail slot is lost"
        refs = {} if self.cache.cold is None else self.cache.cold.loading_blocks()
        for request in self.running:
            for block in request.blocks:
                refs[block.block_id] = refs.get(block.block_id, 0) + 1
        for block in self.cache.pool.blocks:
            assert block.num_refs == refs.get(block.block_id, 0), f"{block} has other readers than the tables say"


def _may_interrupt(request: Request) -> bool:
    """One whose step has failed has to run alone."""
    return request.priority is PriorityClass.URGENT and not request.num_failed_steps
