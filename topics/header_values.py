"""The value of one header: read, or refused with its name. Knows neither which headers there are nor what they mean."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from topics.errors import ErrorCode, InvalidMessage
from topics.names import MAX_TOPIC_CHARS

MAX_ID_CHARS = 256
MAX_CORRELATION_BYTES = 1024
MAX_PARTITION = 2**31 - 1

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class FoundHeader:
    """A header that is there; the name as it was spelled."""

    name: str
    value: bytes


def printable(value: bytes) -> str | None:
    """The text of printable UTF-8, None for anything else."""
    try:
        read = value.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return read if read and read.isprintable() else None


def text(found: FoundHeader) -> str:
    """As it came. Like every parser here: raises InvalidMessage that names the header."""
    read = printable(found.value)
    if read is None or len(read) > MAX_ID_CHARS:
        raise _invalid(found, f"must be printable UTF-8 of at most {MAX_ID_CHARS} characters")
    return read


def topic(found: FoundHeader) -> str:
    """As it came, bad characters marked: whether it may be written to is for `validate_reply_topic` to say."""
    return found.value[: MAX_TOPIC_CHARS + 1].decode("utf-8", "replace")


def lower(found: FoundHeader) -> str:
    return text(found).strip().lower()


def correlation_id(found: FoundHeader) -> bytes:
    if len(found.value) > MAX_CORRELATION_BYTES or len(found.name) > MAX_ID_CHARS:
        raise _invalid(found, f"must have at most {MAX_CORRELATION_BYTES} bytes")
    return found.value


def integer(low: int, high: int) -> Callable[[FoundHeader], int]:
    def parse(found: FoundHeader) -> int:
        raw = found.value.strip()
        if not (raw.isdigit() and len(raw) <= 16 and low <= int(raw) <= high):
            raise _invalid(found, f"must be a decimal number from {low} to {high}")
        return int(raw)

    return parse


def one_of(choices: tuple[str, ...]) -> Callable[[FoundHeader], str]:
    def parse(found: FoundHeader) -> str:
        read = lower(found)
        if read not in choices:
            raise _invalid(found, f"must be one of {', '.join(choices)}")
        return read

    return parse


def partition(found: FoundHeader) -> int:
    """Decimal text, or the four big-endian bytes of Spring and Quarkus."""
    raw = found.value
    if len(raw) == 4 and not raw.isdigit():
        number = int.from_bytes(raw, "big", signed=True)
        if number >= 0:
            return number
    elif raw.isdigit() and len(raw) <= 10 and int(raw) <= MAX_PARTITION:
        return int(raw)
    raise _invalid(found, "must be a partition number, as decimal text or four big-endian bytes")


def trace(found: FoundHeader) -> str:
    read = text(found)
    if not _TRACEPARENT.fullmatch(read):
        raise _invalid(found, "is not a W3C traceparent")
    return read


def _invalid(found: FoundHeader, reason: str) -> InvalidMessage:
    name = shown(found.name)
    return InvalidMessage(ErrorCode.INVALID_VALUE, f"header {name} {reason}", name)


def shown(name: str) -> str:
    """A header's name that can stand in an error."""
    return name if name.isascii() and name.isprintable() else ascii(name)
