"""The bodies a client may send: OpenAI's chat and text completions with vLLM's sampling fields, every value bounded.

A known field that is not built yet is refused by name unless its value changes nothing; fields nobody knows are
collected as `ignored`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from topics.errors import ErrorCode, InvalidMessage
from topics.unbuilt import UNBUILT_FIELDS, refuse_unbuilt

CHAT_COMPLETIONS: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
UNBUILT_OPERATIONS = frozenset({"/v1/embeddings", "/v1/moderations"})

MAX_INT = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16
MAX_IGNORED_NAMES = 32


def _content_text(value: Any) -> Any:
    """Text as itself; a list of text parts becomes its texts joined by newlines, as vLLM does."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict):
            raise PydanticCustomError("part", "parts must be objects with type and text")
        if part.get("type") != "text":
            raise PydanticCustomError(ErrorCode.UNSUPPORTED_PARAMETER, "only parts of type text are supported")
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("part", "a text part must have a string as text")
        texts.append(part["text"])
    return "\n".join(texts)


def _role(value: Any) -> Any:
    if value in ("tool", "function"):
        raise PydanticCustomError(ErrorCode.UNSUPPORTED_PARAMETER, "tool messages are not supported")
    return "system" if value == "developer" else value


def _one_prompt(value: Any) -> Any:
    if isinstance(value, list):
        if len(value) == 1 and isinstance(value[0], str):
            return value[0]
        raise PydanticCustomError(
            ErrorCode.UNSUPPORTED_PARAMETER, "one string is supported: send a record for each prompt, and no token ids"
        )
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _top_k_or_off(value: Any) -> Any:
    return None if type(value) is int and value in (-1, 0) else value


def _biases(value: Any) -> Any:
    """JSON has text keys only: token ids come as decimal text."""
    if not isinstance(value, dict):
        return value
    if not all(isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 for key in value):
        raise PydanticCustomError("token_id", "keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class _WireModel(BaseModel):
    """No coercion: text is no number, a boolean is no integer; extra fields are kept aside."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


class StreamOptions(_WireModel):
    """Accepted for compatibility: the last chunk always carries the usage."""

    include_usage: bool = False


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_WireModel):
    """One turn; `content` is text, whatever form it came in. `developer` is another name of `system`."""

    role: Annotated[
        Literal["system", "user", "assistant"],
        BeforeValidator(_role, json_schema_input_type=Literal["system", "developer", "user", "assistant"]),
    ]
    content: Annotated[str, BeforeValidator(_content_text, json_schema_input_type=str | list[TextPart])]


class GenerationRequest(_WireModel):
    """What every generating operation may ask. Defaults are OpenAI's."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[
        int | None, Field(ge=1, le=MAX_INT), BeforeValidator(_top_k_or_off, json_schema_input_type=int | None)
    ] = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10, allow_inf_nan=False)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] = 1
    stop: Annotated[
        tuple[StopString, ...],
        Field(strict=False, max_length=4),
        BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
    ] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(strict=False, max_length=64)] = ()
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]],
        Field(max_length=1024),
        BeforeValidator(_biases, json_schema_input_type=dict[str, float]),
    ] = Field(default_factory=dict)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None


class ChatCompletionRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[tuple[Message, ...], Field(strict=False, min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs to be true")
        return self

    @property
    def max_output_tokens(self) -> int | None:
        """The client's bound on each choice; None leaves it to the worker."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives wanted for each token; None is no log probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`, with one prompt of text: token ids could smuggle in control tokens."""

    prompt: Annotated[str, Field(min_length=1), BeforeValidator(_one_prompt, json_schema_input_type=str)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def max_output_tokens(self) -> int | None:
        """The bound on each choice, OpenAI's default where the client names none."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives wanted for each token; None is no log probabilities at all."""
        return self.logprobs


RequestBody = ChatCompletionRequest | CompletionRequest

OPERATIONS: Mapping[str, type[ChatCompletionRequest] | type[CompletionRequest]] = {
    CHAT_COMPLETIONS: ChatCompletionRequest,
    COMPLETIONS: CompletionRequest,
}
"""Operation -> model of its body. A new operation is a line here."""


def validate_body(operation: str, body: Mapping[str, Any]) -> tuple[RequestBody, tuple[str, ...]]:
    """The validated body and the names of the fields that were ignored, at most `MAX_IGNORED_NAMES` of them.

    Null fields count as absent. Raises InvalidMessage, whose message never quotes a value.
    """
    model = OPERATIONS.get(operation)
    if model is None:
        if operation in UNBUILT_OPERATIONS:
            raise InvalidMessage(
                ErrorCode.UNSUPPORTED_OPERATION, f"x-operation {operation} is not supported yet", "x-operation"
            )
        raise InvalidMessage(
            ErrorCode.UNKNOWN_OPERATION, "x-operation is not an operation of this worker", "x-operation"
        )
    present = {name: value for name, value in body.items() if value is not None}
    refuse_unbuilt(present)
    known = {name: value for name, value in present.items() if name not in UNBUILT_FIELDS}
    try:
        parsed = model.model_validate(known)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_context=False, include_input=False)[0]) from None
    return parsed, _ignored(parsed)


def _invalid(error: ErrorDetails) -> InvalidMessage:
    where = ".".join(_plain(str(part)) for part in error["loc"])
    if not where and error["type"] == "top_logprobs":
        where = "top_logprobs"
    unsupported = error["type"] == ErrorCode.UNSUPPORTED_PARAMETER
    code = ErrorCode.UNSUPPORTED_PARAMETER if unsupported else ErrorCode.INVALID_VALUE
    return InvalidMessage(code, f"{where}: {error['msg']}" if where else error["msg"], where or None)


def _ignored(body: RequestBody) -> tuple[str, ...]:
    names = [_plain(name) for name in body.model_extra or ()]
    if body.stream_options is not None:
        names += [f"stream_options.{_plain(name)}" for name in body.stream_options.model_extra or ()]
    if isinstance(body, ChatCompletionRequest):
        inside = {
            _plain(name) for message in body.messages for name, value in (message.model_extra or {}).items() if value
        }
        names += [f"messages.{name}" for name in sorted(inside)]
    return tuple(names[:MAX_IGNORED_NAMES])


def _plain(name: str) -> str:
    """A field name that can stand in a header."""
    short = name[:64]
    return short if short.isascii() and short.isprintable() and "," not in short else ascii(short).replace(",", ";")
