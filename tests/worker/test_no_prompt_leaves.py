"""Whatever happens to a prompt, its text is in no log line, no error, no metric and no reason of a dead letter.

Nor is its answer in a log line.
"""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from engine.scripted import ScriptedEngine
from worker.app import WorkerApp
from worker.clock import SystemClock
from worker.logs import configure_logs
from worker.metrics import Metrics
from worker.settings import Settings

SECRET = "kumquat"


class Failing(ScriptedEngine):
    """An engine with a fault of ours that puts the prompt into an exception."""

    def encode_chat(self, messages):
        if "[[fault]]" in messages[0].content:
            raise ValueError(messages[0].content) from KeyError(messages[0].content)
        return super().encode_chat(messages)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The whole log, the most talkative."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    stream, before = io.StringIO(), structlog.get_config()
    configure_logs("debug", log_format="json", stream=stream)
    yield stream
    structlog.configure(**before)


def bodies() -> dict[str, bytes | dict]:
    """Every way to fail that has the secret at the place that fails."""
    message = {"role": "user", "content": SECRET}
    return {
        "good": {"messages": [message]},
        "error": {"messages": [{"role": "user", "content": f"[[error]] {SECRET}"}]},
        "fault": {"messages": [{"role": "user", "content": f"[[fault]] {SECRET}"}]},
        "stall": {"messages": [{"role": "user", "content": f"[[stall]] {SECRET}"}]},
        "long": {"messages": [{"role": "user", "content": SECRET * 1000}]},
        "broken JSON": b'{"messages": "' + SECRET.encode() + b'"',
        "not UTF-8": b'{"messages": "' + SECRET.encode() + b'\xff"}',
        "not an object": json.dumps([SECRET]).encode(),
        "wrong role": {"messages": [{"role": SECRET, "content": "x"}]},
        "wrong content": {"messages": [{"role": "user", "content": {"text": SECRET}}]},
        "wrong number": {"messages": [message], "max_tokens": SECRET},
        "wrong stop": {"messages": [message], "stop": {SECRET: SECRET}},
        "wrong model": {"messages": [message], "model": SECRET},
        "unbuilt": {"messages": [message], "tools": [{"function": {"name": SECRET}}]},
        "wrong bias": {"messages": [message], "logit_bias": {SECRET: 1}},
    }


async def test_no_text_of_a_prompt_is_logged_or_told_in_an_error(rig, lines):
    """The log at its most talkative, all error replies, all metrics, and the headers of all dead letters."""
    for name, body in bodies().items():
        await rig.send(body, x_request_id=name)
    metrics = Metrics()
    settings = Settings(
        group_id="workers",
        max_body_bytes=20_000,
        max_model_len=512,
        first_token_timeout_ms=300,
        streaming_timeout_ms=300,
        log_level="debug",
    )
    await WorkerApp(settings, rig.broker, Failing(max_model_len=512), SystemClock(), metrics).run(until_end=True)
    errors = 0
    for name in bodies():
        for reply in rig.replies(name):
            if reply.headers["x-event"] == b"error":
                errors += 1
                assert SECRET not in json.dumps(reply.body), name
                assert SECRET.encode() not in b"".join(reply.headers.values()), name
    assert errors == len(bodies()) - 1
    letters = rig.dead_letters()
    assert letters
    assert all(SECRET.encode() not in b"".join(value or b"" for _, value in letter.headers) for letter in letters)
    assert SECRET not in metrics.exposition().decode()
    log = lines.getvalue()
    assert SECRET not in log
    assert rig.answer("good") not in log
    assert "ValueError" in log
    assert "in encode_chat" in log
