"""Every bad input of a client is an InvalidMessage that names its field, and nothing else ever comes out."""

import json
from typing import Any

import pytest
import zstandard

from topics.codec import PromptRequest, decode
from topics.errors import InvalidMessage
from topics.headers import RequestHeaders
from topics.requests import ChatCompletionRequest, CompletionRequest
from topics.unbuilt import UNBUILT_FIELDS

LIMIT = 64 << 10
HELLO = [{"role": "user", "content": "hello"}]
COMPLETIONS = RequestHeaders(operation="/v1/completions")
ZSTD = RequestHeaders(content_encoding="zstd")


def decoded(value: bytes | dict[str, Any] | None, headers: RequestHeaders | None = None) -> PromptRequest:
    raw = json.dumps(value).encode() if isinstance(value, dict) else value
    return decode(raw, headers or RequestHeaders(), request_id="r1", max_body_bytes=LIMIT)


def refused(value: bytes | dict[str, Any] | None, headers: RequestHeaders | None = None) -> tuple[str, str | None]:
    with pytest.raises(InvalidMessage) as error:
        decoded(value, headers)
    if error.value.param is not None:
        assert error.value.param.split(".")[0] in error.value.message
    return str(error.value.code), error.value.param


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, "null_value"),
        (b"", "empty_value"),
        (b"   ", "invalid_json"),
        (b'{"messages": "\xff"}', "invalid_encoding"),
        (b'{"user": "\\ud83d", "messages": []}', "invalid_encoding"),
        (b"{", "invalid_json"),
        (b"[1, 2]", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b'{"x": NaN}', "invalid_json"),
        (b'{"x": {"y": -Infinity}}', "invalid_json"),
        (b"[" * 60_000, "invalid_json"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "invalid_json"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'\x00\x00\x00\x00\x07{"messages": []}', "schema_registry_frame"),
        (b" " * (LIMIT + 1), "body_too_large"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else str(value),
)
def test_a_value_that_is_no_json_object_is_refused_with_its_own_code(value: bytes | None, code: str) -> None:
    """The client learns what is wrong with the bytes."""
    assert refused(value)[0] == code


def test_the_schema_registry_error_says_what_to_change() -> None:
    """A client with a registry serializer is told to produce plain JSON."""
    with pytest.raises(InvalidMessage, match="no schema registry"):
        decoded(b"\x00\x00\x00\x00\x07{}")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", 2**31, "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("temperature", -0.1, "temperature"),
        ("temperature", 2.1, "temperature"),
        ("temperature", "1", "temperature"),
        ("top_p", 0, "top_p"),
        ("top_k", -2, "top_k"),
        ("min_p", 1.5, "min_p"),
        ("n", 0, "n"),
        ("n", 17, "n"),
        ("stop", ["a"] * 5, "stop"),
        ("stop", "", "stop.0"),
        ("stop", [1], "stop.0"),
        ("stop_token_ids", [-1], "stop_token_ids.0"),
        ("logit_bias", {"cat": 1}, "logit_bias"),
        ("logit_bias", {"5": 101}, "logit_bias.5"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("presence_penalty", 3, "presence_penalty"),
        ("seed", 1.5, "seed"),
        ("seed", 2**64, "seed"),
        ("top_logprobs", 5, "top_logprobs"),
        ("stream", "true", "stream"),
        ("model", "", "model"),
        ("user", ["x"], "user"),
        ("messages", [], "messages"),
        ("messages", "hello", "messages"),
        ("messages", [{"role": "root", "content": "x"}], "messages.0.role"),
        ("messages", [{"role": "user"}], "messages.0.content"),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages.0.content"),
    ],
)
def test_a_field_out_of_its_bounds_is_named(field: str, value: Any, param: str) -> None:
    """Each bound is checked here, and the answer says which field broke it."""
    assert refused({"messages": HELLO, field: value}) == ("invalid_value", param)


def test_nan_and_infinite_temperatures_are_refused_by_name() -> None:
    """A NaN literal is no JSON; a number too large for a float is out of bounds."""
    body = b'{"messages": [{"role": "user", "content": "x"}], "temperature": %s}'
    assert refused(body % b"NaN") == ("invalid_json", "temperature")
    assert refused(body % b"1e999") == ("invalid_value", "temperature")


def test_a_billion_tokens_pass_the_wire_and_are_for_the_worker_to_judge() -> None:
    """Only the worker knows the model's context."""
    body = decoded({"messages": HELLO, "max_tokens": 10**9}).body
    assert body.max_output_tokens == 10**9


@pytest.mark.parametrize("field", sorted(UNBUILT_FIELDS))
def test_a_known_field_that_is_not_built_is_refused_by_name(field: str) -> None:
    """Never silence; and null or a value that asks for nothing is accepted."""
    assert refused({"messages": HELLO, field: ["something"]}) == ("unsupported_parameter", field)
    for neutral in [None, *UNBUILT_FIELDS[field]]:
        assert decoded({"messages": HELLO, field: neutral}).ignored == ()


def test_unsupported_turns_and_parts_are_refused_by_name() -> None:
    """Tool turns, tool calls and images are known and not built."""
    tool = {"role": "tool", "content": "x"}
    assert refused({"messages": [tool]}) == ("unsupported_parameter", "messages.0.role")
    calls = {"role": "assistant", "content": "", "tool_calls": [{}]}
    assert refused({"messages": [*HELLO, calls]}) == ("unsupported_parameter", "messages.1.tool_calls")
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    assert refused({"messages": [image]}) == ("unsupported_parameter", "messages.0.content")
    assert refused({"prompt": [1, 2]}, COMPLETIONS) == ("unsupported_parameter", "prompt")


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        ("/v1/embeddings", "unsupported_operation"),
        ("/v1/moderations", "unsupported_operation"),
        ("/v1/chat", "unknown_operation"),
    ],
)
def test_other_operations_are_refused(operation: str, code: str) -> None:
    """A known operation that is not built is told from an unknown one."""
    assert refused({"messages": HELLO}, RequestHeaders(operation=operation)) == (code, "x-operation")


def test_unknown_fields_are_ignored_and_named() -> None:
    """At any level; names that cannot stand in a header are escaped."""
    body = {"messages": [{**HELLO[0], "name": "bob"}], "flavour": 1, "a,b\n": 2, "stream_options": {"x": 1}}
    assert decoded(body).ignored == ("flavour", "'a;b\\n'", "stream_options.x", "messages.name")


def test_a_chat_body_is_read_whole() -> None:
    """OpenAI's and vLLM's fields arrive typed; text parts are joined; developer is system."""
    request = decoded(
        {
            "model": "m",
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
            "max_tokens": 5,
            "max_completion_tokens": 7,
            "temperature": 0,
            "stop": "END",
            "top_k": -1,
            "logit_bias": {"42": -100},
            "logprobs": True,
            "top_logprobs": 2,
            "tools": None,
        }
    )
    body = request.body
    assert isinstance(body, ChatCompletionRequest)
    assert [(turn.role, turn.content) for turn in body.messages] == [("system", "be brief"), ("user", "a\nb")]
    assert (body.max_output_tokens, body.temperature, body.stop, body.top_k) == (7, 0.0, ("END",), None)
    assert (body.logit_bias, body.num_logprobs, request.ignored) == ({42: -100.0}, 2, ())


def test_a_text_completion_is_read() -> None:
    """One prompt of text, alone or in a list; OpenAI's default of 16 tokens."""
    for prompt in ("once", ["once"]):
        body = decoded({"prompt": prompt}, COMPLETIONS).body
        assert isinstance(body, CompletionRequest)
        assert (body.prompt, body.max_output_tokens, body.num_logprobs) == ("once", 16, None)


def test_zstd_values_are_unpacked_under_the_limit() -> None:
    """A bomb is stopped at the body limit, and broken or foreign encodings are named."""
    raw = json.dumps({"messages": HELLO}).encode()
    assert isinstance(decoded(zstandard.compress(raw), ZSTD).body, ChatCompletionRequest)
    assert refused(zstandard.compress(b" " * (100 << 20)), ZSTD) == ("body_too_large", None)
    assert refused(b"no zstd", ZSTD) == ("invalid_encoding", "content-encoding")
    assert refused(raw, RequestHeaders(content_encoding="gzip")) == ("invalid_encoding", "content-encoding")
    assert refused(zstandard.compress(raw)[:-4], ZSTD)[0] in {"invalid_encoding", "invalid_json"}


def test_a_zstd_window_larger_than_the_limit_is_refused_unread() -> None:
    """A frame may ask its reader for two gigabytes of memory before its first byte."""
    header = b"\x28\xb5\x2f\xfd\x00\xa8"  # magic, a frame without a content size, a window of 2 GiB
    block = b"\x11\x00\x00{}"  # the last block, raw, two bytes
    asked = RequestHeaders(content_encoding="zstd")
    assert refused(header + block, asked) == ("invalid_encoding", "content-encoding")
    assert refused(header[:5] + b"\x58" + block, asked)[0] == "invalid_value", "a window of 2 MiB is read"


@pytest.mark.parametrize(("field", "value"), [("best_of", True), ("store", 0), ("min_tokens", False)])
def test_a_neutral_value_of_another_type_is_not_neutral(field: str, value: Any) -> None:
    """In Python true equals 1; in JSON it does not."""
    body = {"messages": [{"role": "user", "content": "x"}], field: value}
    assert refused(body) == ("unsupported_parameter", field)
