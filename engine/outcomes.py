"""What a step has changed, once it has run or failed: tokens, blocks, and which requests go on."""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from engine.api import Decision, FinishReason
from engine.batch import SampledRow, ScheduledBatch
from engine.cache.manager import KVCacheManager
from engine.config import EngineConfig
from engine.fairness import TenantCounters
from engine.predictors import OutputLengthPredictor
from engine.request import Request
from engine.step_result import StepResult

MAX_FAILED_STEPS = 2


class Requests(Protocol):
    """Those that the scheduler has, and what may become of them."""

    @property
    def on_device(self) -> list[Request]: ...

    def finish(self, request: Request, reason: FinishReason) -> None: ...

    def preempt(self, request: Request, why: Decision) -> None: ...


class Outcomes:
    """Books steps. `tenants` are charged for what ran, `lengths` learn from what ended."""

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCacheManager,
        requests: Requests,
        tenants: TenantCounters,
        lengths: OutputLengthPredictor,
        decisions: Counter[Decision],
    ) -> None:
        self._config = config
        self._cache = cache
        self._requests = requests
        self._tenants = tenants
        self._lengths = lengths
        self._decisions = decisions

    def update(self, batch: ScheduledBatch, sampled: Iterable[SampledRow]) -> StepResult:
        """The step succeeded: commit its blocks, append its tokens, end what is complete."""
        self._cache.commit_step()
        by_id = {request.request_id: request for request in self._requests.on_device}
        for row in batch.rows:
            request = by_id[row.request_id]
            request.num_computed_tokens += len(row.token_ids)
            request.num_failed_steps = 0
            self._tenants.charge(request, len(row.token_ids))
            if request.num_computed_tokens >= request.num_prompt_tokens:
                self._cache.withdraw_promises(request)
        result = StepResult()
        for token in sampled:
            request = by_id[token.request_id]
            if token.token_id is None:
                self._requests.finish(request, FinishReason.ERROR)
                result.fail(request, token.error or "the token could not be chosen")
                continue
            request.output_token_ids.append(token.token_id)
            result.advanced.append((request, token))
            reason = request.reason_to_finish(token.token_id, self._config.max_model_len)
            if reason is not None:
                self._lengths.observe(request)
                self._requests.finish(request, reason)
                result.finished.append(request)
        return result

    def discard(
        self, batch: ScheduledBatch, message: str, *, out_of_memory: bool = False, is_final: bool = False
    ) -> StepResult:
        """The step failed: nothing it wrote is kept. Its requests run again alone; one that fails alone ends. Where
        memory was short they run again together, with half the chunks."""
        self._cache.discard_step()
        result = StepResult()
        by_id = {request.request_id: request for request in self._requests.on_device}
        halved = 0
        if out_of_memory:
            halved = sum(self._halve_chunk(by_id[row.request_id], len(row.token_ids)) for row in batch.rows)
        self._decisions[Decision.CHUNK_HALVED] += halved
        for row in batch.rows:
            request = by_id[row.request_id]
            request.num_failed_steps += not halved
            if is_final or (len(batch.rows) == 1 and request.num_failed_steps >= MAX_FAILED_STEPS):
                self._requests.finish(request, FinishReason.ERROR)
                result.fail(request, message)
            else:
                self._requests.preempt(request, Decision.PREEMPTED_AFTER_FAILURE)
        return result

    def _halve_chunk(self, request: Request, num_tokens: int) -> bool:
        """Not below a block: what has no room for that fails."""
        if num_tokens <= self._config.block_size:
            return False
        request.prefill_chunk = max(self._config.block_size, num_tokens // 2)
        return True
