"""Events between prompt and answer, for requests with `x-progress: 1`. They belong to no attempt: without `x-seq` and
`x-attempt` they change nothing for a reader that applies the attempt rule."""

import json
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from topics.replies import ReplyContext, ReplyRecord


class ProgressEvent(StrEnum):
    """ACCEPTED: valid, and queued. STARTED: there is a first token. HEARTBEAT: still in work."""

    ACCEPTED = "accepted"
    STARTED = "started"
    HEARTBEAT = "heartbeat"


class ProgressBody(BaseModel):
    """Value of a progress event."""

    object: Literal["progress"] = "progress"
    expected_wait_ms: Annotated[int, Field(ge=0, description="Until the first token; null when unknown.")] | None


class ProgressHeaders(BaseModel):
    """Headers of a progress event. Beside these, the correlation id returns under the header it came in."""

    request_id: Annotated[str, Field(alias="x-request-id")]
    event: Annotated[ProgressEvent, Field(alias="x-event")]
    content_type: Annotated[Literal["application/json"], Field(alias="content-type")]


def progress_record(ctx: ReplyContext, event: ProgressEvent, expected_wait_ms: int | None) -> ReplyRecord:
    """One event, ready to send."""
    headers = [
        ("x-request-id", ctx.request_id.encode("utf-8", "replace")),
        ("x-event", event.value.encode()),
        ("content-type", b"application/json"),
    ]
    if ctx.correlation_header is not None and ctx.correlation_id is not None:
        headers.append((ctx.correlation_header, ctx.correlation_id))
    body = ProgressBody(expected_wait_ms=expected_wait_ms)
    return json.dumps(body.model_dump()).encode(), (*headers, *ctx.static_headers)
