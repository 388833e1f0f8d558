"""Starts clients of the broker with patience, and leaves them without waiting for ever."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from worker.broker.api import BrokerUnavailableError

START_SECONDS = 60.0

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


async def bounded(leave: Callable[[], Awaitable[None]], seconds: float) -> None:
    """Await `leave`, and go on without it when it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            await leave()
    except TimeoutError:
        log.warning("left behind", what=getattr(leave, "__qualname__", repr(leave)), seconds=seconds)
