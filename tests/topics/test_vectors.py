"""The test vectors that readers in any language can run, run here."""

import json
from pathlib import Path
from typing import Any

import pytest

import topics
from topics.attempts import AttemptEvent, AttemptReader, EventKind
from topics.errors import InvalidMessage
from topics.headers import parse_headers

VECTORS = Path(topics.__file__).parent / "vectors"


def load(name: str) -> list[Any]:
    lines = (VECTORS / name).read_text(encoding="utf-8").splitlines()
    return [pytest.param(case, id=case["name"]) for case in map(json.loads, lines)]


def as_data(event: AttemptEvent) -> list[Any]:
    if event.kind is EventKind.TEXT:
        return ["text", event.index, event.text]
    return [str(event.kind), event.attempt]


@pytest.mark.parametrize("case", load("attempts.jsonl"))
def test_the_attempt_rule_rebuilds_what_the_vector_expects(case: dict[str, Any]) -> None:
    """State, text by choice, and what is shown while streaming all follow from the records alone."""
    reader = AttemptReader()
    shown: list[AttemptEvent] = []
    for record in case["records"]:
        headers = [(name, text.encode()) for name, text in record["headers"].items()]
        shown += reader.feed(headers, record["value"].encode(), record["order"])
    assert {
        "state": str(reader.state),
        "attempt": reader.attempt,
        "texts": {str(index): text for index, text in reader.texts.items()},
        "finish_reasons": {str(index): reason for index, reason in reader.finish_reasons.items()},
        "error_code": reader.error["code"] if reader.error else None,
        "shown": [as_data(event) for event in shown],
    } == case["expect"]


@pytest.mark.parametrize("case", load("headers.jsonl"))
def test_headers_mean_what_the_vector_expects(case: dict[str, Any]) -> None:
    """Every alias of the ecosystem is understood, and a bad header is refused by name."""
    headers = tuple((name, None if value is None else bytes.fromhex(value)) for name, value in case["headers"])
    expect = dict(case["expect"])
    if "error" in expect:
        with pytest.raises(InvalidMessage) as refused:
            parse_headers(headers)
        assert (refused.value.code, refused.value.param) == (expect["error"], expect["param"])
        return
    if expect.get("correlation_id") is not None:
        expect["correlation_id"] = bytes.fromhex(expect["correlation_id"])
    parsed = parse_headers(headers)
    assert {name: getattr(parsed, name) for name in expect} == expect
