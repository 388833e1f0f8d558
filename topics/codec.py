"""Bytes of a prompt record to a `PromptRequest`. Whatever the bytes, the answer is a request or an InvalidMessage."""

import json
import math
import re
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import zstandard

from topics.errors import ErrorCode, InvalidMessage
from topics.headers import RequestHeaders
from topics.requests import RequestBody, validate_body

MAX_ZSTD_WINDOW_BYTES = 8 << 20
_READ_BYTES = 64 << 10
_SCHEMA_FRAME_BYTES = 5
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A valid prompt. `ignored` names the fields of the body that nobody knows."""

    request_id: str
    operation: str
    body: RequestBody
    ignored: tuple[str, ...] = ()


def decode(value: bytes | None, headers: RequestHeaders, *, request_id: str, max_body_bytes: int) -> PromptRequest:
    """Validate a prompt's value. `max_body_bytes` bounds it packed and unpacked. Raises InvalidMessage only."""
    if value is None:
        raise InvalidMessage(ErrorCode.NULL_VALUE, "the record has no value; a cancel needs the header x-request-id")
    if not value:
        raise InvalidMessage(ErrorCode.EMPTY_VALUE, "the record's value is empty")
    if headers.content_type is not None and headers.content_type.startswith("application/cloudevents"):
        raise InvalidMessage(
            ErrorCode.INVALID_VALUE,
            "content-type: structured CloudEvents are not supported, use the binary mode",
            "content-type",
        )
    fields = _json_object(_text(_unpacked(value, headers.content_encoding, max_body_bytes)))
    body, ignored = validate_body(headers.operation, fields)
    return PromptRequest(request_id=request_id, operation=headers.operation, body=body, ignored=ignored)


def _unpacked(value: bytes, encoding: str | None, max_body_bytes: int) -> bytes:
    if len(value) > max_body_bytes:
        raise _too_large(max_body_bytes)
    if encoding in (None, "identity"):
        return value
    if encoding != "zstd":
        raise InvalidMessage(ErrorCode.INVALID_ENCODING, "content-encoding must be zstd or absent", "content-encoding")
    unpacked = BytesIO()
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES).stream_reader(
            value, read_across_frames=True
        )
        while piece := reader.read(_READ_BYTES):
            unpacked.write(piece)
            if unpacked.tell() > max_body_bytes:
                raise _too_large(max_body_bytes)
    except (zstandard.ZstdError, MemoryError):
        raise InvalidMessage(
            ErrorCode.INVALID_ENCODING, "content-encoding says zstd, but the value is not", "content-encoding"
        ) from None
    return unpacked.getvalue()


def _too_large(max_body_bytes: int) -> InvalidMessage:
    return InvalidMessage(ErrorCode.BODY_TOO_LARGE, f"the body is larger than {max_body_bytes} bytes, also unpacked")


def _text(raw: bytes) -> str:
    if raw[:1] == b"\x00" and len(raw) >= _SCHEMA_FRAME_BYTES:
        raise InvalidMessage(
            ErrorCode.SCHEMA_REGISTRY_FRAME,
            "the value starts with a schema registry's frame (0x00 and a schema id): produce plain JSON, "
            "with a JSON or string serializer that uses no schema registry",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidMessage(ErrorCode.INVALID_ENCODING, f"the body is not UTF-8 (byte {error.start})") from None


def _json_object(text: str) -> dict[str, Any]:
    literals: list[str] = []

    def note_literal(literal: str) -> float:
        literals.append(literal)
        return math.nan

    try:
        fields = json.loads(text, parse_constant=note_literal)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise InvalidMessage(ErrorCode.INVALID_JSON, f"the body is not JSON: {error.msg} at {error.pos}") from None
    except UnicodeEncodeError:
        raise InvalidMessage(ErrorCode.INVALID_ENCODING, "the body has half of a surrogate pair") from None
    except RecursionError:
        raise InvalidMessage(ErrorCode.INVALID_JSON, "the body is nested too deeply") from None
    except ValueError:
        raise InvalidMessage(ErrorCode.INVALID_JSON, "the body has a number with too many digits") from None
    if not isinstance(fields, dict):
        raise InvalidMessage(ErrorCode.INVALID_JSON, "the body must be a JSON object")
    if literals:
        notes = (name for name, value in fields.items() if isinstance(value, float) and math.isnan(value))
        name = next((name for name in notes if name.isidentifier() and len(name) <= 64), None)
        raise InvalidMessage(ErrorCode.INVALID_JSON, f"{name or 'the body'} has {literals[0]}, which is not JSON", name)
    return fields
