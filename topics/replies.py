"""Records of an answer: chunks, the final object, errors; value and headers, ready to send. Knows no broker.

Exactly one record of an attempt is built with the header `x-final`; `x-seq` counts from 0 within an attempt.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topics.errors import error_type
from topics.requests import CHAT_COMPLETIONS

Usage = Mapping[str, Any]
ReplyRecord = tuple[bytes, tuple[tuple[str, bytes], ...]]

WHOLE_HEADER = "x-whole"
"""Marks the record that holds the whole answer, and not the text that follows on the records before it."""

NEST_END_HEADER = "kafka_nest-is-disposed"
NEST_ERROR_HEADER = "kafka_nest-err"


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """What is the same in all records of one attempt. `created` is Unix time in seconds.

    `correlation_id` goes back byte for byte under the header it came in. `nest_text_ids` adds NestJS's end marker;
    `static_headers` are the route's own, on every record.
    """

    request_id: str
    attempt: str
    operation: str
    model: str
    created: int
    correlation_header: str | None = None
    correlation_id: bytes | None = None
    traceparent: str | None = None
    ignored: tuple[str, ...] = ()
    nest_text_ids: bool = False
    static_headers: tuple[tuple[str, bytes], ...] = ()

    @property
    def is_chat(self) -> bool:
        return self.operation == CHAT_COMPLETIONS

    @property
    def body_id(self) -> str:
        """The `id` of every body: `chatcmpl-<request id>-<attempt>`, or `cmpl-...` for text completions."""
        return f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.request_id}-{self.attempt}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A whole answer of one choice, for `final_record`. `logprobs` as `topics.logprobs` makes it."""

    index: int
    text: str
    finish_reason: str
    logprobs: Mapping[str, Any] | None = None


def usage_object(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0, loaded_tokens: int = 0
) -> dict[str, Any]:
    """OpenAI's usage object, and of which tier the cached tokens came: `l3` is the SSD."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": cached_tokens,
            "cached_tokens_by_tier": {"l2": cached_tokens - loaded_tokens, "l3": loaded_tokens},
        },
    }


def chunk_record(
    ctx: ReplyContext,
    seq: int,
    *,
    index: int,
    text: str,
    role_first: bool,
    finish_reason: str | None = None,
    usage: Usage | None = None,
    logprobs: Mapping[str, Any] | None = None,
    final: bool,
) -> ReplyRecord:
    """New text of one choice. `role_first` on the first delta of a choice; `final` makes it the terminal record."""
    choice: dict[str, Any] = {"index": index}
    if ctx.is_chat:
        choice["delta"] = {"role": "assistant", "content": text} if role_first else {"content": text}
    else:
        choice["text"] = text
    choice["logprobs"] = logprobs
    choice["finish_reason"] = finish_reason
    kind = "chat.completion.chunk" if ctx.is_chat else "text_completion"
    return _body(ctx, kind, [choice], usage), _headers(ctx, seq, "final" if final else "chunk", final=final)


def final_record(ctx: ReplyContext, seq: int, *, choices: Sequence[Choice], usage: Usage) -> ReplyRecord:
    """The whole answer as one `chat.completion` or `text_completion`; terminal."""
    bodies: list[dict[str, Any]] = []
    for choice in sorted(choices, key=lambda choice: choice.index):
        text: dict[str, Any] = {"text": choice.text}
        if ctx.is_chat:
            text = {"message": {"role": "assistant", "content": choice.text}}
        bodies.append(
            {"index": choice.index, **text, "logprobs": choice.logprobs, "finish_reason": choice.finish_reason}
        )
    kind = "chat.completion" if ctx.is_chat else "text_completion"
    whole = [(WHOLE_HEADER, b"1")]
    return _body(ctx, kind, bodies, usage), _headers(ctx, seq, "final", final=True, more=whole)


def error_record(
    ctx: ReplyContext,
    seq: int,
    *,
    code: str,
    message: str,
    param: str | None = None,
    retriable: bool = False,
    retry_after_ms: int | None = None,
    usage: Usage | None = None,
) -> ReplyRecord:
    """A terminal error. `message` must hold neither text of the prompt nor a stack trace."""
    body: dict[str, Any] = {
        "error": {"message": message, "type": error_type(code), "code": str(code), "param": param},
    }
    if usage is not None:
        body["usage"] = usage
    more: list[tuple[str, bytes]] = [("x-retriable", b"1" if retriable else b"0")]
    if retry_after_ms is not None:
        more.append(("x-retry-after-ms", b"%d" % retry_after_ms))
    if ctx.nest_text_ids:
        more.append((NEST_ERROR_HEADER, _utf8(message)))
    return _json(body), _headers(ctx, seq, "error", final=True, more=more)


def _body(ctx: ReplyContext, kind: str, choices: list[dict[str, Any]], usage: Usage | None) -> bytes:
    body: dict[str, Any] = {
        "id": ctx.body_id,
        "object": kind,
        "created": ctx.created,
        "model": ctx.model,
        "choices": choices,
    }
    if usage is not None:
        body["usage"] = usage
    return _json(body)


def _headers(
    ctx: ReplyContext, seq: int, event: str, *, final: bool, more: Sequence[tuple[str, bytes]] = ()
) -> tuple[tuple[str, bytes], ...]:
    headers = [
        ("x-request-id", _utf8(ctx.request_id)),
        ("x-attempt", _utf8(ctx.attempt)),
        ("x-seq", b"%d" % seq),
        ("x-event", event.encode()),
        ("content-type", b"application/json"),
    ]
    if ctx.correlation_header is not None and ctx.correlation_id is not None:
        headers.append((ctx.correlation_header, ctx.correlation_id))
    if ctx.traceparent is not None:
        headers.append(("traceparent", _utf8(ctx.traceparent)))
    if final:
        headers.append(("x-final", b"1"))
        if ctx.ignored:
            headers.append(("x-ignored", _utf8(",".join(ctx.ignored))))
        if ctx.nest_text_ids:
            headers.append((NEST_END_HEADER, b"\x00"))
    return (*headers, *more, *ctx.static_headers)


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")
