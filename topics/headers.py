"""Request headers under every name the ecosystem gives them. Knows names, bytes and limits, not their use."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, cast

from topics import header_values as values
from topics.errors import ErrorCode, InvalidMessage
from topics.header_values import FoundHeader
from topics.names import PRIORITY_CLASSES

ReplyMode = Literal["final", "chunks", "both"]
WireHeaders = tuple[tuple[str, bytes | None], ...]

DEFAULT_OPERATION = "/v1/chat/completions"
REPLY_MODES = ("final", "chunks", "both")
MAX_HEADERS = 64
MAX_HEADER_BYTES = 16 * 1024
MAX_TIME_MS = 10**15
MAX_PREFILL_CHUNK = 1 << 20

ALIASES: Mapping[str, tuple[str, ...]] = {
    "correlation": (
        "kafka_correlationid",  # Spring, NestJS
        "reply_correlation_id",  # Quarkus
        "faust-ag-correlationid",
        "correlation_id",  # FastStream
        "x-correlation-id",
    ),
    "reply_topic": ("kafka_replytopic", "reply_topic", "faust-ag-replyto", "reply_to", "x-reply-topic"),
    "reply_partition": ("kafka_replypartition", "reply_partition", "x-reply-partition"),
    "request_id": ("x-request-id",),
    "operation": ("x-operation",),
    "deadline_ms": ("x-deadline-ms",),
    "ttl_ms": ("x-ttl-ms",),
    "tenant": ("x-tenant",),
    "reply_mode": ("x-reply-mode",),
    "priority": ("x-priority",),
    "prefill_chunk": ("x-prefill-chunk",),
    "traceparent": ("traceparent",),
    "content_encoding": ("content-encoding",),
    "content_type": ("content-type",),
    "progress": ("x-progress",),
    "replay": ("x-replay",),
}
"""Field -> header names in lower case; names are compared without case."""

_FIELD_OF = {alias: field for field, aliases in ALIASES.items() for alias in aliases}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """What the headers of a prompt say; None is absent. `correlation_header` keeps the spelling it came in, so do
    `reply_topic_header` and `reply_partition_header`, in which errors name what was sent.

    `speaks_spring`: the client uses `kafka_*` reply headers, so it takes the first record as the answer.
    `nest_text_ids`: it uses them with text ids, as NestJS does, and waits for an end marker.
    `progress`: it wants to hear of its state before the answer comes.
    `replay`: an operator sends it again, so what is remembered of its id does not count.
    """

    request_id: str | None = None
    operation: str = DEFAULT_OPERATION
    correlation_header: str | None = None
    correlation_id: bytes | None = None
    reply_topic_header: str | None = None
    reply_topic: str | None = None
    reply_partition_header: str | None = None
    reply_partition: int | None = None
    deadline_ms: int | None = None
    ttl_ms: int | None = None
    tenant: str | None = None
    reply_mode: ReplyMode | None = None
    priority: str | None = None
    prefill_chunk: int | None = None
    traceparent: str | None = None
    content_encoding: str | None = None
    content_type: str | None = None
    speaks_spring: bool = False
    nest_text_ids: bool = False
    progress: bool = False
    replay: bool = False


def parse_headers(headers: WireHeaders) -> RequestHeaders:
    """Read the headers of a prompt; of a repeated one, under any alias, the last wins. Null values count as absent.

    A bad `traceparent` is ignored. Raises InvalidMessage that names the header, and nothing else.
    """
    if len(headers) > MAX_HEADERS:
        raise InvalidMessage(ErrorCode.HEADERS_TOO_LARGE, f"more than {MAX_HEADERS} headers", "headers")
    if sum(len(name) + len(value or b"") for name, value in headers) > MAX_HEADER_BYTES:
        raise InvalidMessage(ErrorCode.HEADERS_TOO_LARGE, f"more than {MAX_HEADER_BYTES} bytes of headers", "headers")
    return _read(_collect(headers), _strict)


def salvage_headers(headers: WireHeaders) -> RequestHeaders:
    """What can be read of headers that `parse_headers` refuses, so that the error finds its client. Never raises."""
    return _read(_collect(headers), _lenient)


def printable_id(value: bytes) -> str:
    """An opaque id for logs: printable UTF-8 as itself, 16 other bytes as a UUID, else hex."""
    text = values.printable(value)
    if text is not None:
        return text
    return str(uuid.UUID(bytes=value)) if len(value) == 16 else value.hex()


def _collect(headers: WireHeaders) -> dict[str, FoundHeader]:
    found: dict[str, FoundHeader] = {}
    for name, value in headers:
        field = _FIELD_OF.get(name.lower())
        if field is not None and value:
            found[field] = FoundHeader(name, value)
    return found


class _Attempt(Protocol):
    """How a bad header is met: `_strict` raises, `_lenient` makes it absent."""

    def __call__(self, parse: Callable[[FoundHeader], T], found: FoundHeader | None) -> T | None: ...


def _strict(parse: Callable[[FoundHeader], T], found: FoundHeader | None) -> T | None:
    return None if found is None else parse(found)


def _lenient(parse: Callable[[FoundHeader], T], found: FoundHeader | None) -> T | None:
    try:
        return _strict(parse, found)
    except InvalidMessage:
        return None


def _read(found: Mapping[str, FoundHeader], attempt: _Attempt) -> RequestHeaders:
    correlation, topic = found.get("correlation"), found.get("reply_topic")
    partition = found.get("reply_partition")
    correlation_id = attempt(values.correlation_id, correlation)
    spring = any(
        header is not None and header.name.lower().startswith("kafka_") for header in (correlation, topic, partition)
    )
    text_partition = partition is None or partition.value.isdigit()
    nest = spring and correlation_id is not None and values.printable(correlation_id) is not None and text_partition
    return RequestHeaders(
        request_id=attempt(values.text, found.get("request_id")),
        operation=attempt(values.text, found.get("operation")) or DEFAULT_OPERATION,
        correlation_header=correlation.name if correlation is not None and correlation_id is not None else None,
        correlation_id=correlation_id,
        reply_topic_header=values.shown(topic.name) if topic is not None else None,
        reply_topic=attempt(values.topic, topic),
        reply_partition_header=values.shown(partition.name) if partition is not None else None,
        reply_partition=attempt(values.partition, partition),
        deadline_ms=attempt(values.integer(0, MAX_TIME_MS), found.get("deadline_ms")),
        ttl_ms=attempt(values.integer(0, MAX_TIME_MS), found.get("ttl_ms")),
        tenant=attempt(values.text, found.get("tenant")),
        reply_mode=cast("ReplyMode | None", attempt(values.one_of(REPLY_MODES), found.get("reply_mode"))),
        priority=attempt(values.one_of(PRIORITY_CLASSES), found.get("priority")),
        prefill_chunk=attempt(values.integer(1, MAX_PREFILL_CHUNK), found.get("prefill_chunk")),
        traceparent=_lenient(values.trace, found.get("traceparent")),
        content_encoding=attempt(values.lower, found.get("content_encoding")),
        content_type=attempt(values.lower, found.get("content_type")),
        speaks_spring=spring,
        nest_text_ids=nest,
        progress=attempt(values.one_of(("0", "1")), found.get("progress")) == "1",
        replay=attempt(values.one_of(("0", "1")), found.get("replay")) == "1",
    )
