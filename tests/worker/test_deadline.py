import asyncio

import pytest

from engine.scripted import ScriptedEngine
from topics.headers import RequestHeaders
from worker.broker.api import Record
from worker.deadline import Deadline, deadline_of

HOUR = 3_600_000
NOW = 100 * HOUR


def record(timestamp_ms: int) -> Record:
    return Record("prompts", 0, 0, timestamp_ms, None, b"{}")


@pytest.mark.parametrize(
    "headers, timestamp_ms, expected",
    [
        (RequestHeaders(), NOW, None),
        (RequestHeaders(deadline_ms=7, ttl_ms=1000), NOW, Deadline(7, "x-deadline-ms")),
        (RequestHeaders(ttl_ms=1000), NOW - HOUR, Deadline(NOW - HOUR + 1000, "x-ttl-ms")),
        (RequestHeaders(ttl_ms=1000), NOW + 5000, Deadline(NOW + 6000, "x-ttl-ms")),
        (RequestHeaders(ttl_ms=1000), NOW + 5001, Deadline(NOW + 1000, "x-ttl-ms")),
        (RequestHeaders(ttl_ms=1000), NOW - 25 * HOUR, Deadline(NOW + 1000, "x-ttl-ms")),
    ],
    ids=["none", "absolute", "from the stamp", "little ahead", "stamp in the future", "stamp older than the retention"],
)
def test_the_deadline_is_the_header_or_the_time_to_live_from_a_time_that_can_be(headers, timestamp_ms, expected):
    """A record's own time counts only within the retention and five seconds ahead."""
    assert deadline_of(record(timestamp_ms), headers, received_ms=NOW, retention_ms=24 * HOUR) == expected


async def test_a_deadline_ends_a_request_that_waits_in_the_engine(rig, prompt):
    """Told when the time is up, not when its turn comes; the usage says that nothing was generated."""
    engine = ScriptedEngine(tokens_per_second=100, num_blocks=8)
    async with rig.running(rig.app(engine)):
        await rig.send(prompt("[[tokens=64]]", stream=True), x_request_id="first")
        await rig.until_replied("first")
        await rig.send(prompt("[[tokens=64]]"), x_request_id="queued", x_ttl_ms="60")
        await rig.until_replied("queued")
        assert engine.stats().num_running == 1
    (reply,) = rig.replies("queued")
    assert reply.body["error"]["code"] == "deadline_exceeded"
    assert reply.body["usage"]["completion_tokens"] == 0


async def test_a_deadline_that_passed_while_the_model_was_loading_is_told_before_any_work(rig, prompt):
    """The first thing that a started worker says of it."""

    class Loading(ScriptedEngine):
        async def start(self) -> None:
            await asyncio.sleep(0.03)
            await super().start()

    engine = Loading()
    await rig.send(prompt(), x_request_id="r", x_ttl_ms="10")
    await rig.serve_all(engine)
    assert rig.error("r") == "deadline_exceeded"
    assert engine.stats().generated_tokens_total == 0


async def test_a_deadline_runs_on_while_no_worker_does(rig, prompt):
    """The time to live counts from the record's time, so a second attempt has only what is left; partial usage."""
    app = rig.app(ScriptedEngine(tokens_per_second=20), grace_seconds=0.05)
    await rig.send(prompt("[[tokens=64]]", stream=True), x_request_id="r", x_ttl_ms="500")
    async with rig.running(app):
        await rig.until_replied("r")
    engine = ScriptedEngine(tokens_per_second=20)
    await rig.serve_all(engine)
    last = rig.replies("r")[-1]
    assert last.body["error"]["code"] == "deadline_exceeded"
    assert last.body["usage"]["completion_tokens"] == engine.stats().generated_tokens_total
    assert engine.stats().generated_tokens_total < 10
    assert await rig.uncommitted() == {}


async def test_a_deadline_after_the_end_changes_nothing(rig, prompt):
    """One answer."""
    async with rig.running(rig.app()):
        await rig.send(prompt(), x_request_id="r", x_ttl_ms="2000")
        await rig.until_replied("r")
    assert rig.answer("r")
    assert len(rig.replies("r")) == 1
