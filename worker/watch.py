"""Waits for the next delta of one request, and no longer than its limits allow."""

import asyncio
from collections.abc import AsyncIterator

from engine.api import Delta
from worker.clock import Clock
from worker.deadline import Deadline
from worker.ended import DeadlineExceeded, RequestCancelled, StreamStalled


class DeltaWatch:
    """Interrupts only the wait for the engine, never a reply on its way, so that a sent record is always counted.

    Time to the first token has its own limit. One timer serves many waits: it is set again only when it fires too
    early, or would fire too late. `close` ends it.
    """

    def __init__(
        self, clock: Clock, *, deadline: Deadline | None, first_token_seconds: float, between_tokens_seconds: float
    ) -> None:
        self._clock = clock
        self._told_by = None if deadline is None else deadline.header
        self._deadline = None if deadline is None else clock.now() + (deadline.unix_ms - clock.wall_ms()) / 1000
        self._limit = self._first = first_token_seconds
        self._between = between_tokens_seconds
        self._cancelled = False
        self._scope: asyncio.Timeout | None = None
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Leave no timer behind; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def cancel(self) -> None:
        """End the wait that runs, or the next one, with RequestCancelled."""
        self._cancelled = True
        self._interrupt()

    def check(self) -> None:
        """Raise RequestCancelled or DeadlineExceeded when it is so."""
        if self._cancelled:
            raise RequestCancelled
        if self._deadline is not None and self._clock.now() >= self._deadline:
            raise DeadlineExceeded(self._told_by)

    def begin_again(self) -> None:
        """The next delta is the first one of another run."""
        self._limit = self._first

    async def next(self, deltas: AsyncIterator[Delta]) -> Delta | None:
        """The next delta, None at the end. Raises RequestCancelled, DeadlineExceeded, StreamStalled."""
        self.check()
        seconds = self._limit
        if self._deadline is not None:
            seconds = min(seconds, self._deadline - self._clock.now())
        self._expect_within(seconds)
        try:
            async with asyncio.timeout(None) as self._scope:
                delta = await anext(deltas, None)
        except TimeoutError:
            self.check()
            raise StreamStalled from None
        finally:
            self._scope = None
        self._limit = self._between
        return delta

    def _expect_within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._until = loop.time() + seconds
        if self._timer is None or self._timer.when() > self._until:
            self.close()
            self._timer = loop.call_at(self._until, self._ring)

    def _ring(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        if self._scope is None:
            return  # nobody waits; the next wait sets it again
        if loop.time() >= self._until:
            self._interrupt()
        else:
            self._timer = loop.call_at(self._until, self._ring)

    def _interrupt(self) -> None:
        """End the wait that runs, if one does and it is not ending already."""
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(0.0)
