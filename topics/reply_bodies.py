"""What a reply's value and headers may be, for readers that validate and for the published contract."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from topics.errors import ErrorCode


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CachedTokensByTier(_Body):
    """Where the KV of cached prompt tokens was: l2 in memory, l3 on the SSD."""

    l2: Annotated[int, Field(ge=0)]
    l3: Annotated[int, Field(ge=0)]


class PromptTokensDetails(_Body):
    cached_tokens: Annotated[int, Field(ge=0)]
    cached_tokens_by_tier: CachedTokensByTier


class UsageBody(_Body):
    """Tokens of the whole request, all choices together."""

    prompt_tokens: Annotated[int, Field(ge=0)]
    completion_tokens: Annotated[int, Field(ge=0)]
    total_tokens: Annotated[int, Field(ge=0)]
    prompt_tokens_details: PromptTokensDetails


class _Choice(_Body):
    index: Annotated[int, Field(ge=0)]
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class DeltaBody(_Body):
    role: Literal["assistant"] | None = None
    content: str


class ChunkChoice(_Choice):
    delta: DeltaBody


class MessageBody(_Body):
    role: Literal["assistant"]
    content: str


class MessageChoice(_Choice):
    message: MessageBody


class TextChoice(_Choice):
    text: str


class _Completion(_Body):
    id: str
    created: int
    model: str
    usage: UsageBody | None = None


class ChatCompletionChunk(_Completion):
    """New text; the last of an attempt has `finish_reason` and `usage`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]


class ChatCompletion(_Completion):
    """A whole answer."""

    object: Literal["chat.completion"]
    choices: list[MessageChoice]


class TextCompletion(_Completion):
    """New text, or with the header `x-whole` a whole answer."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ErrorDetail(_Body):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    code: ErrorCode
    param: str | None


class ErrorReply(_Body):
    """Why there is no answer."""

    error: ErrorDetail
    usage: UsageBody | None = None


class ReplyHeaders(BaseModel):
    """Headers of a reply, as text. Beside these, the correlation id returns under the header it came in, and a
    route may add headers of its own (`reply_headers`)."""

    request_id: Annotated[str, Field(alias="x-request-id", description="Of the prompt, or made from its place.")]
    attempt: Annotated[str, Field(alias="x-attempt", description="Opaque; attempts are never compared.")]
    seq: Annotated[str, Field(alias="x-seq", pattern="^[0-9]+$", description="0, 1, 2, ... within an attempt.")]
    event: Annotated[
        Literal["chunk", "final", "error"],
        Field(alias="x-event", description="`chunk`, `final` or `error`."),
    ]
    content_type: Annotated[Literal["application/json"], Field(alias="content-type", description="Of the value.")]
    final: Annotated[Literal["1"] | None, Field(alias="x-final", description="`1` on one record of an attempt.")] = None
    whole: Annotated[
        Literal["1"] | None,
        Field(alias="x-whole", description="`1` where the value is the whole answer, and not the text behind others."),
    ] = None
    retriable: Annotated[
        Literal["0", "1"] | None,
        Field(alias="x-retriable", description="On errors: whether the same prompt may succeed later."),
    ] = None
    retry_after_ms: Annotated[
        str | None,
        Field(alias="x-retry-after-ms", pattern="^[0-9]+$", description="On errors: not before so many milliseconds."),
    ] = None
    ignored: Annotated[
        str | None,
        Field(alias="x-ignored", description="On the terminal record: fields of the body nobody knows, by commas."),
    ] = None
    traceparent: Annotated[str | None, Field(description="Of the prompt.")] = None


REPLIES: dict[str, type[BaseModel]] = {
    "ChatCompletionChunk": ChatCompletionChunk,
    "ChatCompletion": ChatCompletion,
    "TextCompletion": TextCompletion,
    "ErrorReply": ErrorReply,
}
"""Message name in the published contract -> model of its value."""
