"""Starts clients of the broker with patience, and leaves them without waiting for ever."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from worker.broker.api import BrokerUnavailableError

START_SECONDS = 60.0
LEAVE_SECONDS = 10.0
HURRY_SECONDS = 1.0

log = structlog.get_logger(__name__)


class _Client(Protocol):
    async def start(self) -> None: ...


async def started(client: _Client) -> None:
    """Start a client of the broker, again and again for a while: a broker may come up after the worker."""
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(BrokerUnavailableError),
        stop=stop_after_delay(START_SECONDS),
        wait=wait_random_exponential(multiplier=0.2, max=5.0),
        reraise=True,
    ):
        with attempt:
            await client.start()


async def bounded(leave: Callable[[], Coroutine[Any, Any, None]], seconds: float, hurry: asyncio.Event) -> bool:
    """Await `leave`, and go on without it when it takes longer, or a second after `hurry` was set; whether it ended.
    Raises what it raises."""
    leaving, hurrying = asyncio.ensure_future(leave()), asyncio.ensure_future(hurry.wait())
    try:
        await asyncio.wait({leaving, hurrying}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if hurrying.done():
            await asyncio.wait({leaving}, timeout=min(seconds, HURRY_SECONDS))
        if leaving.done():
            await leaving
            return True
        log.warning("left behind", what=getattr(leave, "__qualname__", repr(leave)))
        return False
    finally:
        for task in (leaving, hurrying):
            task.cancel()
        await asyncio.gather(leaving, hurrying, return_exceptions=True)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Await `work`, or give it up when `stop` is set first; whether it ended. Raises what it raises."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
            return True
        return False
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
