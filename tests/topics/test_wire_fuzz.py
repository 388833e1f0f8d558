"""Random records: the wire answers each with a request or an InvalidMessage."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from topics.codec import decode
from topics.errors import InvalidMessage
from topics.headers import parse_headers, salvage_headers
from topics.requests import ChatCompletionRequest, CompletionRequest
from topics.unbuilt import UNBUILT_FIELDS

LIMIT = 64 << 10

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        *ChatCompletionRequest.model_fields,
        *CompletionRequest.model_fields,
        *UNBUILT_FIELDS,
        "zzz",
        "model_dump",
        "__class__",
    ]
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]) | JSON, "content": st.text() | JSON})
)
BODIES = st.dictionaries(FIELDS, JSON, max_size=5).flatmap(
    lambda body: st.builds(lambda messages: {**body, "messages": messages, "prompt": "x"}, MESSAGES)
)
HEADER_NAMES = st.sampled_from(
    [
        "kafka_correlationId",
        "REPLY_PARTITION",
        "x-request-id",
        "x-ttl-ms",
        "x-priority",
        "traceparent",
        "content-encoding",
        "x-operation",
        "kafka_replyTopic",
        "x-prefill-chunk",
        "x-reply-mode",
        "x-tenant",
        "content-type",
    ]
) | st.text(max_size=5)
HEADERS = st.lists(
    st.tuples(
        HEADER_NAMES,
        st.none()
        | st.binary(max_size=24)
        | st.sampled_from([b"zstd", b"/v1/completions", b"final", b"12", b"\xff\xff\xff\xff"]),
    ),
    max_size=6,
).map(tuple)


@settings(max_examples=200, deadline=None)
@given(headers=HEADERS, value=st.none() | st.binary(max_size=64) | BODIES.map(lambda body: json.dumps(body).encode()))
def test_whatever_a_client_sends_is_a_request_or_an_invalid_message(
    headers: tuple[tuple[str, bytes | None], ...], value: bytes | None
) -> None:
    """No other exception leaves the wire, and its message and parameter can stand in an error reply."""
    salvage_headers(headers)
    try:
        request = decode(value, parse_headers(headers), request_id="r1", max_body_bytes=LIMIT)
        ",".join(request.ignored).encode()
    except InvalidMessage as error:
        assert error.message
        json.dumps([error.code, error.message, error.param], ensure_ascii=False).encode()
