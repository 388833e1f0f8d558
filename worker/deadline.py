"""Until when a request is worth answering. A pure decision."""

from topics.headers import RequestHeaders
from worker.broker.api import Record

MAX_AHEAD_MS = 5_000


def deadline_ms(record: Record, headers: RequestHeaders, *, received_ms: int, retention_ms: int) -> int | None:
    """Unix milliseconds: the absolute header, else the TTL from the record's timestamp if that is believable, else
    from receipt; None without either."""
    if headers.deadline_ms is not None:
        return headers.deadline_ms
    if headers.ttl_ms is None:
        return None
    believable = received_ms - retention_ms <= record.timestamp_ms <= received_ms + MAX_AHEAD_MS
    return (record.timestamp_ms if believable else received_ms) + headers.ttl_ms
