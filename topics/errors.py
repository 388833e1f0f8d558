"""What this package raises, and every error code that may stand in a reply. Knows neither Kafka nor engines."""

from enum import StrEnum


class ErrorCode(StrEnum):
    """The `code` of an error reply. Clients may switch on it; a code never changes its meaning."""

    INVALID_JSON = "invalid_json"
    INVALID_ENCODING = "invalid_encoding"
    EMPTY_VALUE = "empty_value"
    NULL_VALUE = "null_value"
    SCHEMA_REGISTRY_FRAME = "schema_registry_frame"
    BODY_TOO_LARGE = "body_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    INVALID_VALUE = "invalid_value"
    INVALID_REQUEST = "invalid_request"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    UNSUPPORTED_OPERATION = "unsupported_operation"
    UNKNOWN_OPERATION = "unknown_operation"
    MODEL_NOT_FOUND = "model_not_found"
    INVALID_REPLY_TOPIC = "invalid_reply_topic"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    CACHE_CAPACITY_EXCEEDED = "cache_capacity_exceeded"
    REQUEST_ID_CONFLICT = "request_id_conflict"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"
    RATE_LIMITED = "rate_limited"
    REPLY_TOO_LARGE = "reply_too_large"
    STREAMING_TIMEOUT = "streaming_timeout"
    MODEL_LOAD_FAILED = "model_load_failed"
    ENGINE_ERROR = "engine_error"
    ENGINE_DEAD = "engine_dead"
    INTERNAL_ERROR = "internal_error"


INVALID_REQUEST_ERROR = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMIT_ERROR = "rate_limit_error"

SERVER_CODES = frozenset(
    {
        ErrorCode.STREAMING_TIMEOUT,
        ErrorCode.MODEL_LOAD_FAILED,
        ErrorCode.ENGINE_ERROR,
        ErrorCode.ENGINE_DEAD,
        ErrorCode.INTERNAL_ERROR,
    }
)


def error_type(code: str) -> str:
    """OpenAI's error `type` for a code: `server_error` where the client did nothing wrong."""
    if code == ErrorCode.RATE_LIMITED:
        return RATE_LIMIT_ERROR
    return SERVER_ERROR if code in SERVER_CODES else INVALID_REQUEST_ERROR


class InvalidMessage(Exception):  # noqa: N818  the wire contract names it so
    """The record breaks the wire contract. Sending it again unchanged never helps.

    `message` names the field and holds no text of the prompt; `param` is the field or header, None for the whole body.
    """

    retriable = False
    err_type = INVALID_REQUEST_ERROR

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
