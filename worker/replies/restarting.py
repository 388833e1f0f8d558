"""A replier that survives its producer: a new attempt says again what was kept, and nothing is generated again."""

import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from engine.api import Delta, Usage
from worker.broker.api import ProducerWedgedError
from worker.replies.api import Failure, Replier, ReplyUndeliverable

MAX_RESTARTS = 5

T = TypeVar("T")

log = structlog.get_logger(__name__)


def new_attempt() -> str:
    """An opaque id that was never used before."""
    return uuid.uuid4().hex


class RestartingReplier:
    """See `worker.replies.api.Replier`. Raises ReplyUndeliverable when one producer after the other is wedged."""

    def __init__(self, replier: Replier) -> None:
        self._replier = replier
        self._num_restarts = 0

    async def send(self, delta: Delta) -> None:
        try:
            await self._replier.send(delta)
        except ProducerWedgedError as error:
            self.restart(self._next(error))  # it holds the delta already

    async def finish(self) -> Usage:
        return await self._until_sent(self._replier.finish)

    async def fail(self, failure: Failure) -> None:
        await self._until_sent(lambda: self._replier.fail(failure))

    async def close(self) -> None:
        await self._replier.close()

    def restart(self, attempt: str) -> None:
        self._replier.restart(attempt)

    async def _until_sent(self, send: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await send()
            except ProducerWedgedError as error:
                self.restart(self._next(error))

    def _next(self, error: ProducerWedgedError) -> str:
        self._num_restarts += 1
        if self._num_restarts > MAX_RESTARTS:
            raise ReplyUndeliverable(f"{MAX_RESTARTS} producers in a row could not send") from error
        attempt = new_attempt()
        log.info("attempt starts again on another producer", attempt=attempt)
        return attempt
