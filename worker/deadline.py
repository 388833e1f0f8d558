"""Until when a request is worth answering. A pure decision."""

from typing import NamedTuple

from topics.headers import ALIASES, RequestHeaders
from worker.broker.api import Record

MAX_AHEAD_MS = 5_000


class Deadline(NamedTuple):
    """When, and the header that says so."""

    unix_ms: int
    header: str


def deadline_of(record: Record, headers: RequestHeaders, *, received_ms: int, retention_ms: int) -> Deadline | None:
    """The absolute header, else the TTL from the record's timestamp if that is believable, else from receipt; None
    without either."""
    if headers.deadline_ms is not None:
        return Deadline(headers.deadline_ms, ALIASES["deadline_ms"][0])
    if headers.ttl_ms is None:
        return None
    believable = received_ms - retention_ms <= record.timestamp_ms <= received_ms + MAX_AHEAD_MS
    begins = record.timestamp_ms if believable else received_ms
    return Deadline(begins + headers.ttl_ms, ALIASES["ttl_ms"][0])
