"""One dead letter as it was written, and the prompt that it becomes when it is sent again."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from topics.headers import ALIASES, WireHeaders, salvage_headers
from worker.broker.api import Record
from worker.dead_letter import DIGEST_HEADER, PREFIX, SPRING_PREFIX, without_reasons

REPLAY_HEADER = "x-replay"
_DEADLINES = frozenset((*ALIASES["deadline_ms"], *ALIASES["ttl_ms"]))


class NotReplayableError(Exception):
    """The dead letter cannot be sent again."""


@dataclass(frozen=True, slots=True)
class Letter:
    """Where the prompt was and why it is here, from either dialect; None for what the letter does not say."""

    record: Record
    topic: str | None
    partition: int | None
    offset: int | None
    reason: str
    message: str

    @property
    def place(self) -> str:
        """Its name on the command line."""
        return f"{self.record.partition}:{self.record.offset}"

    @property
    def origin(self) -> str:
        return "-" if self.topic is None else f"{self.topic}-{self.partition}-{self.offset}"

    @property
    def request_id(self) -> str:
        """The id its replies had: the client's, else the one made of its place."""
        return salvage_headers(self.record.headers).request_id or self.origin

    @property
    def has_value(self) -> bool:
        return not any(name == DIGEST_HEADER for name, _ in self.record.headers)

    def replay(self, *, keep_deadline: bool) -> tuple[str, bytes | None, bytes | None, WireHeaders]:
        """Topic, key, value and headers: what the client sent, marked as a replay, with the request id it had, and
        without its deadline unless that is kept. Raises NotReplayableError."""
        if self.topic is None:
            raise NotReplayableError(f"{self.place} does not say which topic it came from")
        if not self.has_value:
            raise NotReplayableError(f"{self.place} holds a digest of its value, not the value")
        headers = [
            (name, value)
            for name, value in without_reasons(self.record.headers)
            if name.lower() != REPLAY_HEADER and (keep_deadline or name.lower() not in _DEADLINES)
        ]
        if salvage_headers(tuple(headers)).request_id is None:
            headers = [header for header in headers if header[0].lower() not in ALIASES["request_id"]]
            headers.append((ALIASES["request_id"][0], self.origin.encode()))
        return self.topic, self.record.key, self.record.value, (*headers, (REPLAY_HEADER, b"1"))


def parse_letter(record: Record) -> Letter:
    """Never raises: a record that nobody of ours wrote has no origin."""
    named = dict(record.headers)
    connect = {name.removeprefix(PREFIX): value for name, value in named.items() if name.startswith(PREFIX)}
    spring = {
        name.removeprefix(SPRING_PREFIX): value for name, value in named.items() if name.startswith(SPRING_PREFIX)
    }
    if "topic" in connect:
        return Letter(
            record,
            topic=_text(connect, "topic"),
            partition=_decimal(connect.get("partition")),
            offset=_decimal(connect.get("offset")),
            reason=_text(connect, "exception.class.name"),
            message=_text(connect, "exception.message"),
        )
    return Letter(
        record,
        topic=_text(spring, "original-topic") if "original-topic" in spring else None,
        partition=_big_endian(spring.get("original-partition")),
        offset=_big_endian(spring.get("original-offset")),
        reason=_text(spring, "exception-fqcn"),
        message=_text(spring, "exception-message"),
    )


def shown(letter: Letter) -> str:
    """The letter as JSON, for a person: text where it is text, else hex."""
    record = letter.record
    return json.dumps(
        {
            "place": letter.place,
            "written_ms": record.timestamp_ms,
            "origin": letter.origin,
            "request_id": letter.request_id,
            "reason": letter.reason,
            "message": letter.message,
            "key": _readable(record.key),
            "headers": [[name, _readable(value)] for name, value in without_reasons(record.headers)],
            "value": _readable(record.value) if letter.has_value else None,
            "value_bytes": len(record.value or b""),
            "digest": _readable(dict(record.headers).get(DIGEST_HEADER)),
        },
        indent=2,
        ensure_ascii=False,
    )


def _decimal(value: bytes | None) -> int | None:
    return int(value) if value and value.isdigit() and len(value) < 20 else None


def _big_endian(value: bytes | None) -> int | None:
    return None if value is None else int.from_bytes(value, "big")


def _text(named: Mapping[str, bytes | None], name: str) -> str:
    return (named.get(name) or b"-").decode("utf-8", "replace")


def _readable(value: bytes | None) -> str | None:
    if value is None:
        return None
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return f"0x{value.hex()}"
