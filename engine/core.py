"""One synchronous turn of the engine: schedule, run, update. Knows no thread and no event loop."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from engine.api import EngineStats, FinishReason
from engine.batch import SampledRow, ScheduledBatch
from engine.cache.manager import KVCacheManager
from engine.config import EngineConfig
from engine.errors import CacheCapacityError, ContextLengthExceededError, InvalidRequestError
from engine.predictors import StepTimePredictor
from engine.request import Request
from engine.scheduler import Scheduler, StepResult

_log = logging.getLogger(__name__)


class ModelRunner(Protocol):
    """Runs a batch in three calls; the batch is plain picklable data."""

    def launch(self, batch: ScheduledBatch) -> None:
        """Start the forward pass of all rows."""

    def sample(self) -> None:
        """Choose a token for every row that asks for one."""

    def collect(self) -> list[SampledRow]:
        """Wait for and return the chosen tokens, in row order."""


class EngineCore:
    """Requests in, one step at a time. Not thread-safe: its owner calls it from one thread."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        *,
        clock: Callable[[], float] = time.monotonic,
        check: bool = False,
    ) -> None:
        self.config = config
        self.runner = runner
        self.cache = KVCacheManager(
            config.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self.scheduler = Scheduler(config, self.cache)
        self.step_times = StepTimePredictor()
        self._clock = clock
        self._check = check
        self._requests: dict[str, Request] = {}
        self._num_steps = self._num_generated = self._num_prompt = self._num_cached = 0
        self._busy = self._prefill = self._decode = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def check_request(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise for what can never run: no prompt, longer than the context, larger than the cache."""
        if num_prompt_tokens < 1:
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        if num_prompt_tokens >= self.config.max_model_len:
            raise ContextLengthExceededError(
                f"the prompt has {num_prompt_tokens} tokens, the model takes at most {self.config.max_model_len - 1}",
                param="prompt",
            )
        total = min(num_prompt_tokens + max_tokens, self.config.max_model_len)
        if self.cache.blocks_for(total) > self.config.num_blocks:
            raise CacheCapacityError(
                f"prompt and answer need {self.cache.blocks_for(total)} KV blocks, "
                f"the cache has {self.config.num_blocks}",
                param="max_tokens",
            )

    def add(self, request: Request) -> None:
        """Queue a request; raises InvalidRequestError for what can never run or an id in use."""
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is running already", param="request_id")
        self.check_request(request.num_prompt_tokens, request.params.max_tokens)
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request between two steps; unknown ids are ignored (it may just have finished)."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.finish(request, FinishReason.ABORT)

    def preempt_if_running(self, request_id: str) -> None:
        """Take a request off the device, to be recomputed; nothing happens to one that waits or has ended."""
        request = self._requests.get(request_id)
        if request is not None and request in self.scheduler.running:
            self.scheduler.preempt(request)

    def step(self) -> StepResult:
        """Run one batch. A failure of the runner ends only the request that fails alone."""
        started = self._clock()
        batch = self.scheduler.schedule(started)
        if not batch.rows:
            return StepResult()
        try:
            self.runner.launch(batch)
            self.runner.sample()
            sampled = self.runner.collect()
        except Exception as error:  # whatever a model raises: the requests are run alone to find the one at fault
            _log.exception("a step of %d requests failed", len(batch.rows))
            result = self.scheduler.discard(batch, f"the step failed: {type(error).__name__}")
        else:
            result = self.scheduler.update(batch, sampled)
            self._count(batch, result, self._clock() - started)
        for request in result.finished:
            self._requests.pop(request.request_id, None)
        if self._check:
            self.scheduler.check()
        return result

    def _count(self, batch: ScheduledBatch, result: StepResult, seconds: float) -> None:
        self.step_times.observe(batch.num_tokens, seconds)
        self._num_steps += 1
        self._busy += seconds
        prefill = batch.num_prefill_tokens / batch.num_tokens
        self._prefill += prefill * seconds
        self._decode += (1 - prefill) * seconds
        self._num_generated += len(result.advanced)
        for request, _ in result.advanced:
            if len(request.output_token_ids) == 1:
                self._num_prompt += request.num_prompt_tokens
                self._num_cached += request.num_cached_tokens

    def stats(self) -> EngineStats:
        pool, scheduler = self.cache.pool, self.scheduler
        return EngineStats(
            kv_utilisation=self.cache.utilisation,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=len(pool.blocks),
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            waiting_tokens=sum(request.num_tokens for request in scheduler.waiting),
            prompt_tokens_total=self._num_prompt,
            generated_tokens_total=self._num_generated,
            cached_prompt_tokens_total=self._num_cached,
            preemptions_total=scheduler.num_preemptions,
            evictions_total=pool.num_evictions,
            steps_total=self._num_steps,
            busy_seconds_total=self._busy,
            prefill_seconds_total=self._prefill,
            decode_seconds_total=self._decode,
        )
