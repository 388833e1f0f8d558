import asyncio

import pytest

from engine.scripted import ScriptedEngine
from worker.broker.api import BrokerUnavailableError, TopicNotAvailableError, UnreadableRecordsError
from worker.broker.memory import MemoryReader
from worker.cancel import cancel_record, parse_cancel
from worker.clock_check import KEY as CLOCK_KEY


async def cancel(rig, request_id: str) -> None:
    key, value = cancel_record("", request_id)
    await rig.producer.send(rig.names.control, value, key=key)


async def test_a_cancel_before_arrival_stops_the_prompt(rig, prompt):
    """The control topic is read to its end before the first prompt."""
    engine = ScriptedEngine()
    await cancel(rig, "r")
    await rig.send(prompt(), x_request_id="r")
    await rig.serve_all(engine)
    assert rig.error("r") == "cancelled"
    assert engine.stats().generated_tokens_total == 0
    assert await rig.uncommitted() == {}


async def test_a_cancel_ends_a_running_stream(rig, prompt):
    """The error follows the chunks in sequence and is terminal."""
    async with rig.running(rig.app(ScriptedEngine(tokens_per_second=5))):
        await rig.send(prompt("[[tokens=64]]", stream=True), x_request_id="r")
        await rig.until_replied("r")
        await cancel(rig, "r")
        await rig.until_replied("r", len(rig.replies("r")) + 1)
    replies = rig.replies("r")
    assert replies[-1].body["error"]["code"] == "cancelled"
    assert [int(reply.headers["x-seq"]) for reply in replies] == list(range(len(replies)))
    assert await rig.uncommitted() == {}


async def test_a_cancel_after_the_end_changes_nothing(rig, prompt):
    """One answer, no error."""
    async with rig.running(rig.app()):
        await rig.send(prompt(), x_request_id="r")
        await rig.until_replied("r")
        await cancel(rig, "r")
        await rig.send(prompt(), x_request_id="next")
        await rig.until_replied("next")
    assert rig.answer("r")
    assert len(rig.replies("r")) == 1


async def test_a_null_value_with_a_request_id_is_a_cancel_for_all_workers(rig, prompt):
    """Whoever reads it publishes it on the control topic."""
    await rig.send(None, "urgent", x_request_id="r")
    await rig.serve_all()
    await rig.send(prompt(), x_request_id="r")
    await rig.serve_all()
    assert rig.error("r") == "cancelled"
    assert rig.dead_letters() == []
    assert await rig.uncommitted() == {}


async def test_a_cancel_that_the_control_topic_does_not_take_at_once_is_sent_again(rig, prompt):
    """It stops its own request here meanwhile, and no other."""
    async with rig.running(rig.app(ScriptedEngine(tokens_per_second=100))) as task:
        await rig.send(prompt("[[tokens=64]]", stream=True), x_request_id="other")
        await rig.until_replied("other")
        rig.broker.fail_next("send", BrokerUnavailableError("away"), topic=rig.names.control)
        await rig.send(None, x_request_id="r")
        await rig.until_replied("other", 9)
        assert not task.done()
    assert len(rig.answer("other")) == 64
    assert [parse_cancel(record) for record in rig.broker.records(rig.names.control)].count(("", "r")) == 1
    assert rig.dead_letters() == []
    assert await rig.uncommitted() == {}


async def test_a_cancel_that_the_control_topic_never_takes_is_a_dead_letter(rig, prompt):
    """A worker without the right to write there would end at every start on the same record."""
    async with rig.running(rig.app(reply_give_up_seconds=0.1)):
        rig.broker.fail_next("send", TopicNotAvailableError("forbidden"), 1000, topic=rig.names.control)
        await rig.send(None, x_request_id="r")
        await rig.until_replied("r", topic=rig.names.dead_letter)
        await rig.send(prompt(), x_request_id="other")
        await rig.until_replied("other")
    assert await rig.uncommitted() == {}


async def test_a_cancel_reaches_a_request_that_waits_in_the_engine(rig, prompt):
    """It is told at once, with the tokens of its prompt and none of an answer; the one before it goes on."""
    engine = ScriptedEngine(tokens_per_second=100, num_blocks=8)
    async with rig.running(rig.app(engine)):
        await rig.send(prompt("[[tokens=64]]", stream=True), x_request_id="first")
        await rig.until_replied("first")
        await rig.send(prompt("[[tokens=64]]"), x_request_id="queued")
        await cancel(rig, "queued")
        await rig.until_replied("queued")
        assert engine.stats().num_running == 1
    (reply,) = rig.replies("queued")
    assert reply.body["error"]["code"] == "cancelled"
    assert reply.body["usage"]["completion_tokens"] == 0
    assert len(rig.answer("first")) == 64


async def test_a_cancel_outlives_the_worker(rig, prompt):
    """Sent while nobody runs, to a prompt that a worker had begun: the next one tells the client and generates none."""
    app = rig.app(ScriptedEngine(tokens_per_second=5), grace_seconds=0.05)
    await rig.send(prompt("[[tokens=64]]", stream=True), x_request_id="r")
    async with rig.running(app):
        await rig.until_replied("r")
    await cancel(rig, "r")
    engine = ScriptedEngine()
    await rig.serve_all(engine)
    assert rig.replies("r")[-1].body["error"]["code"] == "cancelled"
    assert engine.stats().generated_tokens_total == 0
    assert await rig.uncommitted() == {}


async def test_a_cancelled_stream_says_what_it_has_spent(rig, prompt):
    """Prompt tokens, and those generated so far."""
    engine = ScriptedEngine(tokens_per_second=20)
    async with rig.running(rig.app(engine)):
        await rig.send(prompt("[[tokens=64]]", stream=True), x_request_id="r")
        await rig.until_replied("r")
        await cancel(rig, "r")
        await rig.until_replied("r", len(rig.replies("r")) + 1)
    usage = rig.replies("r")[-1].body["usage"]
    assert usage["prompt_tokens"] == engine.stats().prompt_tokens_total
    assert 0 < usage["completion_tokens"] <= engine.stats().generated_tokens_total


@pytest.mark.parametrize("key", [b"k", CLOCK_KEY])
@pytest.mark.parametrize("value", [b"[" * 100_000, b'{"type": "cancel", "request_id": 5}', b"\xff", b'"cancel"', None])
async def test_a_control_record_that_cannot_be_read_ends_no_worker(rig, prompt, value, key):
    """Every worker reads the topic at every start: one that raised there would end the whole group for good."""
    await rig.producer.send(rig.names.control, value, key=key)
    await rig.send(prompt(), x_request_id="good")
    await rig.serve_all()
    assert rig.answer("good")


@pytest.mark.parametrize("at_start", [True, False])
async def test_control_records_that_cannot_be_read_are_tried_again(rig, prompt, monkeypatch, at_start):
    """The worker says so and goes on with its prompts; at a start it waits, since it could miss a cancel."""
    monkeypatch.setattr("worker.control.AGAIN_SECONDS", 0.01)
    app, poll, seen, told = rig.app(), MemoryReader.poll, [], asyncio.Event()
    failing = 3 if at_start else 0

    async def corrupt(self, max_records, timeout_seconds):
        nonlocal failing
        if failing and self is app._control:
            seen.append(app.unready)
            failing -= 1
            if not failing:
                told.set()
            raise UnreadableRecordsError("bad CRC")
        return await poll(self, max_records, timeout_seconds)

    monkeypatch.setattr(MemoryReader, "poll", corrupt)
    async with rig.running(app):
        await rig.send(prompt(), x_request_id="before")
        await rig.until_replied("before")
        failing = 0 if at_start else 3
        async with asyncio.timeout(5):
            await told.wait()
        await cancel(rig, "r")
        await rig.send(prompt("[[slow]]"), x_request_id="r")
        await rig.until_replied("r")
    assert rig.error("r") == "cancelled"
    assert len(seen) == 3
    assert at_start or seen[1:] == ["control records cannot be read"] * 2
