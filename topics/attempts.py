"""The attempt rule: which of the answers in a reply partition is *the* answer. For readers; knows no broker.

Attempts are opaque and never compared. Each is assembled by itself; the one whose seq 0 came last is shown; the
first terminal record in partition order whose attempt is complete from seq 0 settles the request, and nothing after
it counts.
`topics/vectors/attempts.jsonl` says the same as data, for readers in any language.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MAX_SEQ_DIGITS = 18


class AttemptState(StrEnum):
    """PENDING: nothing ended yet. INCOMPLETE: an attempt ended whose beginning or middle was not seen; a later one may
    still settle the request. COMPLETE and ERROR are final."""

    PENDING = "pending"
    INCOMPLETE = "incomplete"
    COMPLETE = "complete"
    ERROR = "error"


SETTLED = frozenset({AttemptState.COMPLETE, AttemptState.ERROR})


class EventKind(StrEnum):
    """SHOW: forget what was shown, `attempt` begins. TEXT: append to choice `index`. The others end an attempt."""

    SHOW = "show"
    TEXT = "text"
    INCOMPLETE = "incomplete"
    COMPLETE = "complete"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class AttemptEvent:
    """What a reader that shows the answer while it streams does next."""

    kind: EventKind
    attempt: str
    index: int = 0
    text: str = ""


@dataclass(slots=True)
class _Attempt:
    next_seq: int = 0
    broken: bool = False
    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Reply:
    attempt: str
    seq: int
    event: str
    final: bool
    whole: bool
    retriable: bool
    retry_after_ms: int | None
    body: Mapping[str, Any]


class AttemptReader:
    """Reads the records of one request. Feed it every record of the partition that carries its request id, in order.

    After each `feed`: `state`; `texts` and `finish_reasons` by choice, of the attempt that settled or is shown;
    `usage` and `error` (OpenAI's objects) once settled, with an error whether and when to ask again.
    """

    def __init__(self) -> None:
        self.state = AttemptState.PENDING
        self.attempt: str | None = None
        self.usage: Mapping[str, Any] | None = None
        self.error: Mapping[str, Any] | None = None
        self.retriable = False
        self.retry_after_ms: int | None = None
        self._attempts: dict[str, _Attempt] = {}
        self._last_order: int | None = None

    def __repr__(self) -> str:
        return f"AttemptReader({self.state}, attempt={self.attempt}, attempts={len(self._attempts)})"

    @property
    def settled(self) -> bool:
        return self.state in SETTLED

    @property
    def texts(self) -> Mapping[int, str]:
        return {} if self.attempt is None else self._attempts[self.attempt].texts

    @property
    def finish_reasons(self) -> Mapping[int, str]:
        return {} if self.attempt is None else self._attempts[self.attempt].finish_reasons

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.texts.get(0, "")

    def feed(
        self, headers: Iterable[tuple[str, bytes | None]], value: bytes | None, partition_order: int
    ) -> list[AttemptEvent]:
        """Take one record at offset `partition_order`; an offset read before, and what is no reply, change nothing."""
        if self.settled or (self._last_order is not None and partition_order <= self._last_order):
            return []
        self._last_order = partition_order
        reply = _parse(headers, value)
        if reply is None:
            return []
        attempt = self._attempts.setdefault(reply.attempt, _Attempt())
        if reply.seq < attempt.next_seq:
            return []
        attempt.broken = attempt.broken or reply.seq > attempt.next_seq
        if attempt.broken:
            return self._incomplete(reply) if reply.final else []
        attempt.next_seq += 1
        events: list[AttemptEvent] = []
        if reply.seq == 0:
            events += self._show(reply.attempt)
        added = _absorb(attempt, reply)
        if self.attempt == reply.attempt:
            events += added
        return events + self._settle(reply) if reply.final else events

    def _show(self, attempt: str) -> list[AttemptEvent]:
        self.attempt = attempt
        return [AttemptEvent(EventKind.SHOW, attempt)]

    def _incomplete(self, reply: _Reply) -> list[AttemptEvent]:
        self.state = AttemptState.INCOMPLETE
        return [AttemptEvent(EventKind.INCOMPLETE, reply.attempt)]

    def _settle(self, reply: _Reply) -> list[AttemptEvent]:
        events: list[AttemptEvent] = []
        if self.attempt != reply.attempt:
            events += self._show(reply.attempt)
            events += [AttemptEvent(EventKind.TEXT, reply.attempt, index, text) for index, text in self.texts.items()]
        self.usage = _mapping(reply.body.get("usage"))
        if reply.event == "error":
            self.state, self.error = AttemptState.ERROR, _mapping(reply.body.get("error")) or {}
            self.retriable, self.retry_after_ms = reply.retriable, reply.retry_after_ms
            return [*events, AttemptEvent(EventKind.ERROR, reply.attempt)]
        self.state = AttemptState.COMPLETE
        return [*events, AttemptEvent(EventKind.COMPLETE, reply.attempt)]


def _absorb(attempt: _Attempt, reply: _Reply) -> list[AttemptEvent]:
    """Add a record's text. A whole answer replaces the chunks before it, whose text it holds again."""
    events: list[AttemptEvent] = []
    choices = reply.body.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        index = choice.get("index") if isinstance(choice, dict) else None
        if not isinstance(index, int):
            continue
        text, before = _choice_text(choice), attempt.texts.get(index, "")
        added = text.removeprefix(before) if reply.whole else text
        attempt.texts[index] = text if reply.whole else before + text
        if added:
            events.append(AttemptEvent(EventKind.TEXT, reply.attempt, index, added))
        if isinstance(reason := choice.get("finish_reason"), str):
            attempt.finish_reasons[index] = reason
    return events


def _choice_text(choice: Mapping[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message")
    text = part.get("content") if isinstance(part, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


def _parse(headers: Iterable[tuple[str, bytes | None]], value: bytes | None) -> _Reply | None:
    """None for what is no reply record of ours."""
    named = dict(headers)
    attempt, seq, event = named.get("x-attempt"), named.get("x-seq"), named.get("x-event")
    if not attempt or not seq or not event or not seq.isdigit() or len(seq) > MAX_SEQ_DIGITS:
        return None
    try:
        body = json.loads(value or b"")
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    after = named.get("x-retry-after-ms") or b""
    return _Reply(
        attempt=attempt.decode("utf-8", "backslashreplace"),
        seq=int(seq),
        event=event.decode("utf-8", "backslashreplace"),
        final=named.get("x-final") == b"1",
        whole=named.get("x-whole") == b"1",
        retriable=named.get("x-retriable") == b"1",
        retry_after_ms=int(after) if after.isdigit() and len(after) <= MAX_SEQ_DIGITS else None,
        body=body,
    )


def _mapping(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, dict) else None
