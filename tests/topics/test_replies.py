"""Reply records: their bodies, their headers, and the published contract they obey."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from topics.asyncapi import DEFAULT_PATH, asyncapi_document
from topics.errors import SERVER_CODES, ErrorCode
from topics.logprobs import TokenEntry, logprobs_object
from topics.replies import Choice, ReplyContext, ReplyRecord, chunk_record, error_record, final_record, usage_object
from topics.reply_bodies import ChatCompletion, ChatCompletionChunk, ErrorReply, ReplyHeaders, TextCompletion

CHAT = ReplyContext(
    request_id="r1",
    attempt="a7",
    operation="/v1/chat/completions",
    model="smol",
    created=1_700_000_000,
    correlation_header="kafka_correlationId",
    correlation_id=b"\x00\xff",
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ignored=("flavour", "messages.name"),
)
TEXT = replace(CHAT, operation="/v1/completions")
USAGE = usage_object(10, 3, 8)
ENTRY = TokenEntry("hi", -0.5, (("hi", -0.5), ("ho", float("-inf"))))


def named(record: ReplyRecord) -> dict[str, bytes]:
    headers = dict(record[1])
    assert len(headers) == len(record[1]), "no header is repeated"
    ReplyHeaders.model_validate(
        {name: value.decode() for name, value in headers.items() if name != "kafka_correlationId"}
    )
    return headers


def test_a_chunk_is_an_openai_chunk() -> None:
    """The first delta has the role; the correlation id returns byte for byte; nothing marks it as final."""
    record = chunk_record(CHAT, 0, index=0, text="hi 🙂", role_first=True, final=False)
    body = ChatCompletionChunk.model_validate_json(record[0])
    assert (body.id, body.choices[0].delta.role, body.choices[0].delta.content) == (
        "chatcmpl-r1-a7",
        "assistant",
        "hi 🙂",
    )
    headers = named(record)
    assert (headers["kafka_correlationId"], headers["x-seq"], headers["x-event"]) == (b"\x00\xff", b"0", b"chunk")
    assert not {"x-final", "x-ignored", "x-whole"} & set(headers)


def test_the_last_chunk_is_terminal_and_has_usage() -> None:
    """Finish reason, usage with cached tokens, and the ignored fields by name."""
    record = chunk_record(CHAT, 4, index=0, text="", role_first=False, finish_reason="stop", usage=USAGE, final=True)
    body = ChatCompletionChunk.model_validate_json(record[0])
    assert body.usage is not None
    assert (body.usage.total_tokens, body.usage.prompt_tokens_details.cached_tokens) == (13, 8)
    assert (body.choices[0].finish_reason, body.choices[0].delta.role) == ("stop", None)
    headers = named(record)
    assert (headers["x-event"], headers["x-final"], headers["x-ignored"]) == (b"final", b"1", b"flavour,messages.name")


def test_final_records_hold_the_whole_answer() -> None:
    """Choices in order, for both operations, marked as whole."""
    choices = [Choice(1, "b", "length"), Choice(0, "a", "stop", logprobs_object(CHAT.operation, [ENTRY]))]
    record = final_record(CHAT, 0, choices=choices, usage=USAGE)
    body = ChatCompletion.model_validate_json(record[0])
    assert [(choice.index, choice.message.content) for choice in body.choices] == [(0, "a"), (1, "b")]
    assert (named(record)["x-whole"], named(record)["x-final"]) == (b"1", b"1")
    text = TextCompletion.model_validate_json(final_record(TEXT, 0, choices=choices, usage=USAGE)[0])
    assert (text.id, text.choices[1].text) == ("cmpl-r1-a7", "b")


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_code_makes_a_valid_error(code: ErrorCode) -> None:
    """Errors are terminal and say whether sending again may help."""
    record = error_record(CHAT, 2, code=code, message="no", param="n", retriable=True, retry_after_ms=50, usage=USAGE)
    body = ErrorReply.model_validate_json(record[0])
    assert (body.error.code, body.error.param) == (code, "n")
    headers = named(record)
    assert (headers["x-event"], headers["x-final"], headers["x-retriable"]) == (b"error", b"1", b"1")
    assert headers["x-retry-after-ms"] == b"50"
    assert (body.error.type == "server_error") == (code in SERVER_CODES)


def test_only_requests_with_nest_ids_get_nests_end_marker() -> None:
    """FastStream decodes every header as UTF-8 text, so no other reader sees the zero byte."""
    nest = replace(CHAT, nest_text_ids=True)
    assert dict(final_record(nest, 0, choices=[], usage=USAGE)[1])["kafka_nest-is-disposed"] == b"\x00"
    assert dict(error_record(nest, 0, code="cancelled", message="no")[1])["kafka_nest-err"] == b"no"
    chunk = chunk_record(nest, 0, index=0, text="a", role_first=True, final=False)
    assert not any(name.startswith("kafka_nest") for name, _ in chunk[1])
    for record in (
        final_record(CHAT, 0, choices=[], usage=USAGE),
        error_record(CHAT, 0, code="cancelled", message="no"),
    ):
        assert not any(name.startswith("kafka_nest") for name, _ in record[1])


def test_broken_text_is_still_a_record() -> None:
    """Half of a surrogate pair becomes a question mark, never an exception."""
    record = chunk_record(TEXT, 0, index=0, text="\ud83d", role_first=True, final=False)
    assert TextCompletion.model_validate_json(record[0]).choices[0].text == "?"


def test_log_probabilities_are_finite_json_in_both_forms() -> None:
    """Minus infinity is OpenAI's -9999; completions count characters."""
    chat = logprobs_object("/v1/chat/completions", [ENTRY])
    assert chat["content"][0]["top_logprobs"][1] == {"token": "ho", "logprob": -9999.0, "bytes": [104, 111]}
    text = logprobs_object("/v1/completions", [ENTRY, ENTRY], text_offset=5)
    assert (text["tokens"], text["text_offset"]) == (["hi", "hi"], [5, 7])
    json.dumps([chat, text], allow_nan=False)


def test_the_published_contract_is_current() -> None:
    """`python -m topics.asyncapi` has been run since the models changed, and every reference leads somewhere."""
    document = asyncapi_document()
    published = Path(__file__).parents[2] / DEFAULT_PATH
    assert json.loads(published.read_text(encoding="utf-8")) == json.loads(json.dumps(document))
    for piece in json.dumps(document).split('"$ref": "#/')[1:]:
        found = document
        for step in piece.split('"')[0].split("/"):
            found = found[step]


def test_headers_of_the_route_stand_on_every_record() -> None:
    """A chunk, an answer and an error have them, after ours."""
    ctx = replace(CHAT, static_headers=(("__TypeId__", b"answer"),))
    chunk = chunk_record(ctx, 0, index=0, text="hi", role_first=True, final=False)
    answer = final_record(ctx, 1, choices=[Choice(0, "hi", "stop")], usage=USAGE)
    error = error_record(ctx, 0, code=ErrorCode.DEADLINE_EXCEEDED, message="too late")
    for record in (chunk, answer, error):
        assert named(record)["__TypeId__"] == b"answer"
        assert record[1][-1] == ("__TypeId__", b"answer")
