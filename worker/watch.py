"""Waits for the next delta of one request, and no longer than its limits allow."""

import asyncio
from collections.abc import AsyncIterator

from engine.api import Delta
from worker.clock import Clock
from worker.ended import DeadlineExceeded, RequestCancelled, StreamStalled


class DeltaWatch:
    """Interrupts only the wait for the engine, never a reply on its way, so that a sent record is always counted.

    `deadline` is monotonic seconds of the clock. Time to the first token has its own limit.
    """

    def __init__(
        self, clock: Clock, *, deadline: float | None, first_token_seconds: float, between_tokens_seconds: float
    ) -> None:
        self._clock = clock
        self._deadline = deadline
        self._limit = first_token_seconds
        self._between = between_tokens_seconds
        self._cancelled = False
        self._scope: asyncio.Timeout | None = None

    def cancel(self) -> None:
        """End the wait that runs, or the next one, with RequestCancelled."""
        self._cancelled = True
        if self._scope is not None:
            self._scope.reschedule(0.0)

    def check(self) -> None:
        """Raise RequestCancelled or DeadlineExceeded when it is so."""
        if self._cancelled:
            raise RequestCancelled
        if self._deadline is not None and self._clock.now() >= self._deadline:
            raise DeadlineExceeded

    async def next(self, deltas: AsyncIterator[Delta]) -> Delta | None:
        """The next delta, None at the end. Raises RequestCancelled, DeadlineExceeded, StreamStalled."""
        self.check()
        seconds = self._limit
        if self._deadline is not None:
            seconds = min(seconds, self._deadline - self._clock.now())
        try:
            async with asyncio.timeout(seconds) as self._scope:
                delta = await anext(deltas, None)
        except TimeoutError:
            self.check()
            raise StreamStalled from None
        finally:
            self._scope = None
        self._limit = self._between
        return delta
