"""What one request has taken so far; it is counted and logged once, when the request ends. Never sees its text."""

import structlog

from engine.api import Delta, FinishReason, PriorityClass, Usage
from worker.clock import Clock
from worker.metrics import Metrics

DUPLICATE, UNDELIVERABLE = "duplicate", "undeliverable"
"""Ends of a request beside finish reasons and error codes."""

log = structlog.get_logger(__name__)


class Tally:
    """`began` is monotonic seconds of the clock. `log_requests` gives each request a line in the log."""

    def __init__(self, metrics: Metrics, clock: Clock, priority: PriorityClass, *, log_requests: bool) -> None:
        self.began = clock.now()
        self.num_prompt_tokens = 0
        self.finish_reason = FinishReason.STOP
        self._num_generated = 0
        self._first_token: float | None = None
        self._metrics = metrics
        self._clock = clock
        self._priority = priority
        self._log_requests = log_requests

    @property
    def spent(self) -> Usage:
        """Until now."""
        return Usage(self.num_prompt_tokens, self._num_generated)

    def begin_again(self) -> None:
        """What was generated until now is not this request's."""
        self._num_generated = 0

    def add(self, delta: Delta) -> None:
        if self._first_token is None:
            self._first_token = self._clock.now() - self.began
        self._num_generated += len(delta.token_ids)
        if delta.finish_reason is FinishReason.LENGTH:  # of several choices the one that was cut off is told
            self.finish_reason = FinishReason.LENGTH

    def ended(self, reason: str, usage: Usage) -> None:
        """`usage` is what the engine did for this request alone: nothing for one that followed another."""
        seconds = self._clock.now() - self.began
        num_prompt, num_completion = usage.prompt_tokens, usage.completion_tokens
        self._metrics.request_finished(self._priority, reason, seconds, self._first_token, num_prompt, num_completion)
        if self._log_requests:
            log.info(
                "request ended",
                priority=str(self._priority),
                reason=str(reason),
                prompt_tokens=num_prompt,
                completion_tokens=num_completion,
                seconds=round(seconds, 3),
            )
