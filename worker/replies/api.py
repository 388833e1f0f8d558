"""What every replier does, and where a reply goes. Knows no broker and no engine but its deltas."""

from dataclasses import dataclass
from typing import Protocol

from engine.api import Delta, Usage
from topics.errors import ErrorCode
from topics.replies import ReplyRecord


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one request's replies go; all of them to one partition. `partition` None is chosen by the key."""

    topic: str
    key: bytes
    partition: int | None = None


class ReplyUndeliverable(Exception):  # noqa: N818  the dead letter names it so
    """The broker did not take the reply for good, or not in time."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no answer, as the client is told; `message` holds no text of the prompt. `usage` is what
    was spent until then."""

    code: ErrorCode
    message: str
    param: str | None = None
    retriable: bool = False
    retry_after_ms: int | None = None
    usage: Usage | None = None


class ReplySink(Protocol):
    """Sends records of one attempt in order; returns when the broker has acknowledged.

    Raises ReplyUndeliverable, MessageTooLargeError for the broker's size limit, and ProducerWedgedError when nobody
    knows what arrived: a new attempt has to begin.
    """

    async def send(self, record: ReplyRecord) -> None: ...


class Replier(Protocol):
    """Turns the deltas of one attempt into reply records. After `finish` or `fail` nothing more is sent."""

    async def send(self, delta: Delta) -> None:
        """Take new text; may keep it back for a while to send it with what follows. The text is kept also if it
        raises."""

    async def finish(self) -> Usage:
        """Send the terminal record; returns when it is acknowledged."""

    async def fail(self, failure: Failure) -> None:
        """Send the terminal error; returns when it is acknowledged."""

    def restart(self, attempt: str) -> None:
        """Begin a new attempt: what was taken so far is sent again from seq 0, in fewer records."""

    async def close(self) -> None:
        """Leave nothing behind that would still send; idempotent."""
