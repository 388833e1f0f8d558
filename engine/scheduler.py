"""Which tokens of which requests the next step runs: one synchronous decision, without a tensor or a clock."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.api import FinishReason, PriorityClass
from engine.batch import SampledRow, ScheduledBatch, ScheduledRow
from engine.cache.cost import GateDecision
from engine.cache.manager import KVCacheManager
from engine.config import EngineConfig
from engine.policy import PriorityPolicy
from engine.predictors import OutputLengthPredictor
from engine.request import Request, RequestStatus

MAX_PROMISE_WAITS = 32
MAX_FAILED_STEPS = 2
MAX_LOADS = 2
"""How often one start of a request may wait for the cold tier; what has landed may be evicted before it is used."""


@dataclass(slots=True)
class StepResult:
    """What an update changed: requests that got a token, requests that ended, and errors by request id."""

    advanced: list[tuple[Request, SampledRow]] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


class Scheduler:
    """A token budget per step: running requests first, then waiting ones; a decode is a request with one token to run.

    Allocation is never optimistic: on shortage the least urgent, latest request is preempted and recomputed later, so
    the most urgent, earliest one always advances.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCacheManager,
        *,
        policy: PriorityPolicy | None = None,
        lengths: OutputLengthPredictor | None = None,
    ) -> None:
        self.config = config
        self.cache = cache
        self.policy = policy or PriorityPolicy()
        self.lengths = lengths or OutputLengthPredictor()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.num_preemptions = 0
        self._tail_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._scheduled: dict[str, int] = {}
        self._parked: frozenset[str] = frozenset()
        self._num_batches = 0

    def __repr__(self) -> str:
        counts = f"running={len(self.running)}, waiting={len(self.waiting)}, loading={len(self.loading)}"
        return f"Scheduler({counts}, {self.cache.pool!r})"

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state between two steps; its blocks become free or cached."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._vacate(request)
        elif request.status is RequestStatus.LOADING:
            del self.loading[request.request_id]
        else:
            self.waiting.remove(request)
        self.cache.cancel_load(request.request_id)
        request.finish_reason = reason
        request.move(RequestStatus.FINISHED)

    def preempt(self, request: Request) -> None:
        """Take a running request off the device; it waits again, and what the cold tier does not keep is recomputed."""
        self.running.remove(request)
        self.cache.swap_out(request)
        self._vacate(request)
        request.num_preemptions += 1
        request.num_loads = 0
        self.num_preemptions += 1
        request.move(RequestStatus.PREEMPTED)
        request.move(RequestStatus.WAITING)
        self.waiting.append(request)

    def schedule(self, now: float) -> ScheduledBatch:
        """Plan a step. `now` is monotonic seconds; an empty batch means that there is nothing to do."""
        self._scheduled = {}
        rows: list[ScheduledRow] = []
        self._take_landed()
        self._start_loads(now)
        self._make_room_for_urgent(now)
        suspect = next((r for r in self.policy.order([*self.running, *self.waiting], now) if r.num_failed_steps), None)
        if suspect is not None and suspect.status is RequestStatus.WAITING:
            self._make_room_for_suspect(suspect, now)
        budget = self.config.max_num_batched_tokens
        for request in self.policy.order(self.running, now):
            if request.status is not RequestStatus.RUNNING or (suspect and request is not suspect):
                continue
            budget -= self._schedule_running(request, budget, rows, now)
        if suspect is None or not rows:
            self._admit(rows, budget, now, among=[suspect] if suspect else self.waiting, waits=suspect is None)
        return self._batch(rows)

    @property
    def wants_to_interrupt(self) -> bool:
        """Whether an urgent request that waits, or that has begun inside this step, has no first token yet."""
        return any(self._may_interrupt(r) for r in self.waiting) or any(
            self._may_interrupt(r) and r.num_uncomputed_tokens > 1 and r.request_id not in self._scheduled
            for r in self.running
        )

    def interrupt(self, parked: ScheduledBatch, now: float) -> ScheduledBatch:
        """Plan a step inside another one, which stays parked until `resume`: urgent prefill only, first token included.

        The rows of the parked step keep all that they have. An empty batch means that no urgent request finds room.
        """
        self._scheduled = {row.request_id: len(row.token_ids) for row in parked.rows}
        self._parked = frozenset(self._scheduled)
        self.cache.park_step()
        self._make_room_for_urgent(now)
        rows: list[ScheduledRow] = []
        budget = self.config.max_num_batched_tokens
        for request in self.policy.order(self.running, now):
            urgent = self._may_interrupt(request) and request.num_uncomputed_tokens > 1
            if urgent and request.request_id not in self._parked and self._fits_now(request, budget):
                budget -= self._schedule_running(request, budget, rows, now)
        self._admit(rows, budget, now, among=[r for r in self.waiting if self._may_interrupt(r)])
        return self._batch(rows)

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
            reason = self._finish_reason(request, token.token_id)
            if reason is not None:
                self.lengths.observe(request)
                self.finish(request, reason)
                result.finished.append(request)
        return result

    def discard(self, batch: ScheduledBatch, message: str) -> StepResult:
        """The step failed: nothing it wrote is kept. Its requests run again alone; one that fails alone ends."""
        self.cache.discard_step()
        result = StepResult()
        by_id = {request.request_id: request for request in self.running}
        for row in batch.rows:
            request = by_id[row.request_id]
            request.num_failed_steps += 1
            if len(batch.rows) == 1 and request.num_failed_steps >= MAX_FAILED_STEPS:
                result.errors[request.request_id] = message
                self.finish(request, FinishReason.ERROR)
                result.finished.append(request)
            else:
                self.preempt(request)
        return result

    def _schedule_running(self, request: Request, budget: int, rows: list[ScheduledRow], now: float) -> int:
        """Add one running request to the step, preempting others if it must; returns the tokens taken."""
        num_new = min(request.num_uncomputed_tokens, self.config.prefill_chunk_size, budget)
        if num_new < 1:
            return 0
        while not self.cache.allocate(request, num_new):
            if self._cancel_latest_load():
                continue
            victim = self._shortage_victim(now)
            self.preempt(victim)
            if victim is request:
                return 0
        rows.append(self._row(request, num_new))
        return num_new

    def _take_landed(self) -> None:
        for owner in self.cache.take_landed():
            request = self.loading.pop(owner, None)
            if request is not None:
                request.move(RequestStatus.WAITING)
                self.waiting.append(request)

    def _start_loads(self, now: float) -> None:
        """Fetch what the cold tier has of waiting requests' prefixes, while they wait and while others run."""
        if self.cache.cold is None:
            return
        for position, request in enumerate(self.policy.order(self.waiting, now)):
            if request.num_loads >= MAX_LOADS:
                continue
            decision = self.cache.start_load(request, is_head=position == 0)
            if decision is GateDecision.LOAD:
                request.num_loads += 1
                self.waiting.remove(request)
                request.move(RequestStatus.LOADING)
                self.loading[request.request_id] = request
            elif decision is not GateDecision.SHORTAGE:
                request.num_loads = MAX_LOADS

    def _cancel_latest_load(self) -> bool:
        """Blocks that running requests need are taken from loads first."""
        owner = None if self.cache.cold is None else self.cache.cold.latest_owner()
        if owner is None:
            return False
        self.cache.cancel_load(owner)
        request = self.loading.pop(owner, None)
        if request is not None:
            request.move(RequestStatus.WAITING)
            self.waiting.append(request)
        return True

    def _shortage_victim(self, now: float) -> Request:
        """The least urgent, latest running request that this step does not run yet."""
        return max(
            (r for r in self.running if r.request_id not in self._scheduled), key=lambda r: self.policy.key(r, now)
        )

    def _admit(
        self, rows: list[ScheduledRow], budget: int, now: float, *, among: Sequence[Request], waits: bool = True
    ) -> None:
        for request in self.policy.order(among, now):
            if budget < 1 or request.status is not RequestStatus.WAITING:
                break
            if waits and not self._parked and self._waits(request):
                continue
            if len(self.running) >= self.config.max_num_seqs:
                break
            num_new = self._attach(request, budget)
            if num_new == 0:
                break
            rows.append(self._row(request, num_new))
            budget -= num_new

    def _waits(self, request: Request) -> bool:
        if request.num_promise_waits >= MAX_PROMISE_WAITS or not self.cache.waits_for_promise(request):
            return False
        request.num_promise_waits += 1
        return True

    def _make_room_for_urgent(self, now: float) -> None:
        """Preempt work of lower classes until the urgent requests that wait have slots and blocks; none in vain."""
        slots_wanted = 0
        free = [r for r in self.running if r.request_id not in self._parked]
        for request in self.policy.order(self.waiting, now):
            if request.priority is not PriorityClass.URGENT:
                continue
            slots_wanted += 1
            left, victims = list(self.running), []
            while len(left) + slots_wanted > self.config.max_num_seqs or not self._fits_future_peak(request, left):
                victim = self.policy.victim_for(request, free, now)
                if victim is None:
                    return
                free.remove(victim)
                left.remove(victim)
                victims.append(victim)
            for victim in victims:
                self.preempt(victim)

    def _make_room_for_suspect(self, suspect: Request, now: float) -> None:
        """Preempt until a request that has to run alone fits: nothing runs before it, so nothing else makes room."""
        while self.running and (len(self.running) >= self.config.max_num_seqs or not self._fits_future_peak(suspect)):
            self.preempt(max(self.running, key=lambda request: self.policy.key(request, now)))

    def _attach(self, request: Request, budget: int) -> int:
        """Start a waiting request if its blocks, and the future peak with it, fit; returns its tokens in this step."""
        num_cached = self.cache.attach_prefix(request)
        num_new = min(request.num_uncomputed_tokens, self.config.prefill_chunk_size, budget)
        if not self._fits_future_peak(request) or not self.cache.allocate(request, num_new):
            self.cache.release(request)
            return 0
        num_loaded = self.cache.settle_prefix(request)
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            request.num_loaded_tokens = min(num_loaded, request.num_cached_tokens)
        self.cache.promise(request)
        self.waiting.remove(request)
        request.tail_slot = self._tail_slots.pop()
        request.move(RequestStatus.RUNNING)
        self.running.append(request)
        return num_new

    def _fits_future_peak(self, candidate: Request, running: Sequence[Request] | None = None) -> bool:
        """Whether predicted lengths keep the cache within its size until everybody has finished, beside all that run
        or beside those given.

        Longest remaining first, the peak is the largest sum, over i, of what the first i requests hold when the i-th
        ends. Alone a request always fits: what can never run is refused before it comes here.
        """
        requests = [*(self.running if running is None else running), candidate]
        if len(requests) == 1:
            return True
        size, peak, held = self.config.block_size, 0, 0
        shared: set[int] = set()
        need = []
        for request in requests:
            private = max(0, self.cache.blocks_for(request.num_tokens) - len(request.blocks))
            for block in request.blocks:
                if block.num_refs > 1:
                    shared.add(block.block_id)
                else:
                    private += 1
            need.append((self.lengths.remaining_tokens(request), private))
        for index, (remaining, private) in enumerate(sorted(need, reverse=True), start=1):
            held += private
            peak = max(peak, held + index * -(-remaining // size))
        return peak + len(shared) <= self.config.num_blocks

    @staticmethod
    def _may_interrupt(request: Request) -> bool:
        """One whose step has failed has to run alone."""
        return request.priority is PriorityClass.URGENT and not request.num_failed_steps

    def _fits_now(self, request: Request, budget: int) -> bool:
        """Whether a running request's next chunk finds its blocks without a victim."""
        num_new = min(request.num_uncomputed_tokens, self.config.prefill_chunk_size, budget)
        return self.cache.num_missing_blocks(request, num_new) <= self.cache.pool.num_free

    def _batch(self, rows: list[ScheduledRow]) -> ScheduledBatch:
        self._num_batches += 1
        return ScheduledBatch(rows, self._num_batches)

    def _row(self, request: Request, num_new: int) -> ScheduledRow:
        start = request.num_computed_tokens
        self._scheduled[request.request_id] = num_new
        assert request.tail_slot is not None, f"{request!r} runs without a tail slot"
        return ScheduledRow(
            request_id=request.request_id,
            start=start,
            token_ids=request.tokens(start, start + num_new),
            block_table=[block.block_id for block in request.blocks],
            tail_slot=request.tail_slot,
            sample=start + num_new == request.num_tokens,
            params=request.params,
            choice=request.choice,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
        )

    def _vacate(self, request: Request) -> None:
        assert request.tail_slot is not None, f"{request!r} runs without a tail slot"
        self._tail_slots.append(request.tail_slot)
        request.tail_slot = None
        self.cache.release(request)

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        params = request.params
        if token_id in params.stop_token_ids or (token_id in request.eos_token_ids and not params.ignore_eos):
            return FinishReason.STOP
        if len(request.output_token_ids) >= params.max_tokens or request.num_tokens >= self.config.max_model_len:
            return FinishReason.LENGTH
        return None

    def check(self) -> None:
        """States, lists, slots and block references agree."""
        self.cache.check()
        assert all(r.status is RequestStatus.RUNNING and r.tail_slot is not None for r in self.running), self.running
        assert all(r.status is RequestStatus.WAITING and not r.blocks for r in self.waiting), self.waiting
        assert all(r.status is RequestStatus.LOADING and not r.blocks for r in self.loading.values()), self.loading
        slots = [*self._tail_slots, *(r.tail_slot for r in self.running)]
        assert sorted(s for s in slots if s is not None) == list(range(self.config.max_num_seqs)), "a tail slot is lost"
        refs = {} if self.cache.cold is None else self.cache.cold.loading_blocks()
        for request in self.running:
            for block in request.blocks:
                refs[block.block_id] = refs.get(block.block_id, 0) + 1
        for block in self.cache.pool.blocks:
            assert block.num_refs == refs.get(block.block_id, 0), f"{block} has other readers than the tables say"
