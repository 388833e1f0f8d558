"""Signs of life for requests that ask for them: taken, begun, and now and then how long it may still take.

They are no part of an attempt and never in the way of one: what cannot be sent at once is left out.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from engine.api import PriorityClass
from topics.progress import ProgressEvent
from worker.broker.api import BrokerError
from worker.clock import Clock
from worker.replies.api import ReplyUndeliverable

SEND_SECONDS = 1.0
MAX_WAITS = 200

Send = Callable[[ProgressEvent, int | None], Awaitable[None]]
"""Sends one event with the expected wait in milliseconds, None where nothing is known."""


class ProgressBook:
    """How long requests waited for their first token lately, by class, and who wants to hear of it."""

    def __init__(self, clock: Clock, *, heartbeat_seconds: float) -> None:
        self._clock = clock
        self._heartbeat_seconds = heartbeat_seconds
        self._waits = {cls: deque[float](maxlen=MAX_WAITS) for cls in PriorityClass}
        self._followed: set[Progress] = set()

    def follow(self, cls: PriorityClass, began: float, send: Send | None) -> "Progress":
        """A request that began at `began` (monotonic seconds); `send` None where nobody asked for events."""
        progress = Progress(self, cls, began, send)
        if send is not None:
            self._followed.add(progress)
        return progress

    def forget(self, progress: "Progress") -> None:
        self._followed.discard(progress)

    def observe(self, cls: PriorityClass, began: float) -> None:
        """A request that began then has its first token now."""
        self._waits[cls].append(self._clock.now() - began)

    def expected_wait_ms(self, cls: PriorityClass, began: float) -> int | None:
        """Until the first token: the mean of what those waited still that had waited as long. None when nobody did."""
        waited = self._clock.now() - began
        longer = [wait - waited for wait in self._waits[cls] if wait > waited]
        return round(1000 * sum(longer) / len(longer)) if longer else None

    async def run(self, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Heartbeats, until cancelled."""
        while True:
            await sleep(self._heartbeat_seconds)
            async with asyncio.TaskGroup() as tasks:
                for progress in tuple(self._followed):
                    tasks.create_task(progress.heartbeat())


class Progress:
    """One request. After `ended` nothing more is sent."""

    def __init__(self, book: ProgressBook, cls: PriorityClass, began: float, send: Send | None) -> None:
        self._book = book
        self._cls = cls
        self._began = began
        self._send = send
        self._started = False

    async def accepted(self) -> None:
        """It is valid and waits for the engine."""
        await self._tell(ProgressEvent.ACCEPTED)

    async def token(self) -> None:
        """There is a token; the first one is told."""
        if not self._started:
            self._started = True
            self._book.observe(self._cls, self._began)
            await self._tell(ProgressEvent.STARTED)

    async def heartbeat(self) -> None:
        """It is still in work."""
        await self._tell(ProgressEvent.HEARTBEAT)

    def ended(self) -> None:
        """Its terminal record comes next; idempotent."""
        self._send = None
        self._book.forget(self)

    async def _tell(self, event: ProgressEvent) -> None:
        if self._send is None:
            return
        wait_ms = None if self._started else self._book.expected_wait_ms(self._cls, self._began)
        with suppress(BrokerError, ReplyUndeliverable, TimeoutError):
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(event, wait_ms)
