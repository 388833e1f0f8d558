"""One synchronous turn of the engine: schedule, run, update. Knows no thread and no event loop."""

import logging
import math
import time
from collections.abc import Callable
from functools import partial

from engine.api import EngineStats, FinishReason
from engine.batch import SampledRow, ScheduledBatch
from engine.cache.cold import ColdTier
from engine.cache.cold_prefix import ColdPrefix
from engine.cache.manager import KVCacheManager
from engine.cache.transfers import Transfers
from engine.config import EngineConfig
from engine.door import Door
from engine.errors import (
    EngineError,
    InvalidRequestError,
    is_out_of_memory,
)
from engine.flight import MAX_NAMED, Event, FlightRecorder
from engine.limits import check_request
from engine.model_runner import ModelRunner, StreamingRunner
from engine.prefill_probe import measure_prefill
from engine.request import Request
from engine.scheduler import Scheduler
from engine.snapshot import snapshot
from engine.step_result import StepResult
from engine.step_time import StepLoad
from engine.thermal import ThermalGovernor
from engine.totals import Totals

_log = logging.getLogger(__name__)

MAX_REST_SECONDS = 60.0
LANE_REST_SECONDS = 1.0
"""How long at most a sequence in the lane waits for the SSD unasked; who waits beside it grows older meanwhile."""
MIN_SAMPLE_TOKENS = 16
"""A step with fewer prefill tokens says little of what a token costs."""


class EngineCore:
    """Requests in, one step at a time. Not thread-safe: its owner calls it from one thread."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        *,
        transfers: Transfers | None = None,
        clock: Callable[[], float] = time.monotonic,
        governor: ThermalGovernor | None = None,
        check: bool = False,
    ) -> None:
        self.config = config
        self.runner = runner
        self.cache = KVCacheManager(
            config.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        if transfers is not None:
            self.cache.cold = ColdTier(self.cache.pool, transfers, config.block_size)
            if isinstance(runner, StreamingRunner):
                runner.stream_from(transfers.layers)
                self.cache.cold_prefix = ColdPrefix(self.cache.pool, transfers, config.block_size)
        self.scheduler = Scheduler(config, self.cache, governor=governor)
        self.flight = FlightRecorder()
        self._clock = clock
        self._check = check
        self._requests: dict[str, Request] = {}
        self._in_flight: frozenset[str] = frozenset()
        self._zombies: list[str] = []
        self._totals = Totals()
        self._did_nothing = False

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def rest_seconds(self) -> float | None:
        """How long a step would find nothing to do: 0 if there is work, None until a request comes. A load that lands
        ends the rest early, which `Transfers.on_landed` tells."""
        cold = self.cache.cold
        if cold is not None and cold.transfers.has_landed:
            return 0.0
        deadline = None if cold is None else cold.transfers.next_deadline
        if self.scheduler.lane.request is not None:
            deadline = min(deadline or math.inf, self._clock() + LANE_REST_SECONDS)
        if self.has_work and not (self._did_nothing and deadline is not None):
            return 0.0
        return None if deadline is None else min(max(0.0, deadline - self._clock()), MAX_REST_SECONDS)

    def check_request(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise for what can never run: no prompt, longer than the context, larger than the cache and its SSD."""
        check_request(self.config, self.scheduler.lane.max_blocks, num_prompt_tokens, max_tokens)

    def add(self, request: Request) -> None:
        """Queue a request; raises InvalidRequestError for what can never run or an id in use."""
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is running already", param="request_id")
        self.check_request(request.num_prompt_tokens, request.params.max_tokens)
        self._requests[request.request_id] = request
        self.scheduler.add(request)
        self._did_nothing = False  # whoever loads, this one may have work

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored (it may just have finished). One that is in the step that runs keeps
        its blocks until the step has ended."""
        if request_id in self._in_flight:
            self._zombies.append(request_id)
            return
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.finish(request, FinishReason.ABORT)
            self._did_nothing = False  # what it held may let others run

    def look_again(self) -> None:
        """A load or a write has ended: the next step may find what the last one did not."""
        self._did_nothing = False

    def preempt_if_running(self, request_id: str) -> None:
        """Take a request off the device, to be recomputed; nothing happens to one that waits or has ended."""
        request = self._requests.get(request_id)
        if request is not None and request in self.scheduler.on_device:
            self.scheduler.preempt(request)

    def step(self, door: Door | None = None) -> StepResult:
        """Run one batch. A failure of the runner ends only the request that fails alone.

        Urgent requests that come in by the door while the step runs get their first token inside it: the step stops
        between two segments, and then goes on as if nothing had been.
        """
        batch = self.scheduler.schedule(self._clock())
        self._copy_planned()
        self._did_nothing = not batch.rows
        ended, self.scheduler.ended = self.scheduler.ended, StepResult()
        for request in ended.finished:
            self._requests.pop(request.request_id, None)
        if not batch.rows:
            return ended
        self._in_flight = frozenset(row.request_id for row in batch.rows)
        result = self._run(batch, door if self.config.enable_interrupts else None)
        self._in_flight = frozenset()
        result.add(ended)
        while self._zombies:
            self.abort(self._zombies.pop())
        return result

    def _recorded(self, batch: ScheduledBatch) -> Event:
        """The step that begins, in the flight recorder; one that never ends has no seconds there."""
        return self.flight.record(
            "step",
            self._clock(),
            rows=len(batch.rows),
            tokens=batch.num_tokens,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            free_blocks=self.cache.pool.num_free,
            preemptions=self.scheduler.num_preemptions,
            requests=[row.request_id for row in batch.rows[:MAX_NAMED]],
            seconds=None,
            ended=None,
            failed=None,
        )

    def _run(self, batch: ScheduledBatch, door: Door | None) -> StepResult:
        event = self._recorded(batch)
        began, seconds_inside = event["at"], 0.0
        error: Exception | None = None
        for layers in self.runner.segments(batch):
            if layers[0] and door is not None:
                seconds_inside += self._interrupt(batch, door)
            error = self._attempt(batch, partial(self.runner.launch, batch, layers))
            if error is not None:
                break
        error = error or self._attempt(batch, self.runner.sample)
        sampled: list[SampledRow] = []
        error = error or self._attempt(batch, lambda: sampled.extend(self.runner.collect()))
        if error is not None:
            message = str(error) if isinstance(error, EngineError) else f"the step failed: {type(error).__name__}"
            is_final = self.scheduler.lane.is_hopeless(batch.rows[0].request_id, error)
            result = self.scheduler.discard(batch, message, out_of_memory=is_out_of_memory(error), is_final=is_final)
        else:
            result = self.scheduler.update(batch, sampled)
            seconds = self._clock() - began - seconds_inside
            self._totals.count(batch, result, seconds)
            self._learn(batch, seconds)
        event |= {"seconds": self._clock() - began, "ended": len(result.finished), "failed": len(result.errors)}
        self._copy_planned()
        for request in result.finished:
            self._requests.pop(request.request_id, None)
        if self._check:
            self.scheduler.check()
        return result

    @staticmethod
    def _attempt(batch: ScheduledBatch, call: Callable[[], None]) -> Exception | None:
        try:
            call()
        except Exception as error:  # whatever a model raises: the requests are run alone to find the one at fault
            _log.exception("a step of %d requests failed", len(batch.rows))
            return error
        return None

    def _interrupt(self, parked: ScheduledBatch, door: Door) -> float:
        """Run what urgent requests need for their first token inside the parked step; returns the seconds it took."""
        door.look()
        if not self.scheduler.wants_to_interrupt:
            return 0.0
        began = self._clock()
        batch = self.scheduler.interrupt(parked, began)
        self._copy_planned()
        if batch.rows:
            self._totals.interrupts += 1
            door.publish(self._run(batch, None))
        self.scheduler.resume()
        return self._clock() - began

    def _copy_planned(self) -> None:
        """Between two steps, while the blocks still hold what was planned to be copied."""
        if self.cache.cold is not None:
            self.cache.cold.copy_planned()

    def warm_up(self) -> None:
        """Before the first prompt: measure what a token of one costs, in blocks that hold nothing yet, and begin to
        load what earlier processes used most."""
        cold = self.cache.cold
        if cold is None:
            return
        cold.cost.observe_prefill(*measure_prefill(self.runner, self.config, self._clock))
        self.cache.warm_up()

    def close(self) -> None:
        """End the copies of the cold tier and give its directories back."""
        if self.cache.cold is not None:
            self.cache.cold.close()

    def _learn(self, batch: ScheduledBatch, seconds: float) -> None:
        """What a step took tells what others will, unless a disk had its part in it."""
        if batch.is_streamed:
            return
        self.scheduler.step_times.observe(StepLoad.of(batch), seconds)
        if self.cache.cold is not None and batch.num_prefill_tokens >= MIN_SAMPLE_TOKENS:
            share = batch.num_prefill_tokens / batch.num_tokens
            self.cache.cold.cost.observe_prefill(batch.num_prefill_tokens, share * seconds)

    def stats(self) -> EngineStats:
        return snapshot(self._totals, self.cache, self.scheduler)
