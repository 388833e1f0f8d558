"""What becomes of answers when a producer can never send again, and of a topic that does not take them."""

import asyncio

import pytest

from engine.api import ChatMessage
from engine.scripted import ScriptedEngine, scripted_answer
from worker.broker.api import NewTopic, ProducerWedgedError, TopicNotAvailableError
from worker.broker.memory import MemoryBroker
from worker.renewing_producer import RenewingProducer, ResendingProducer
from worker.replies.producers import ReplyProducers

SLOW = "v4flash.replies.slow"


def text_of(prompt: str) -> str:
    return scripted_answer(ScriptedEngine().encode_chat([ChatMessage("user", prompt)]), 64)


def attempts(replies: list) -> list[bytes]:
    return list(dict.fromkeys(reply.headers["x-attempt"] for reply in replies))


@pytest.mark.parametrize("operation", ["send", "ack"])
@pytest.mark.parametrize("mode", ["final", "chunks", "both"])
async def test_a_wedged_producer_costs_an_attempt_and_no_answer(rig, prompt, mode, operation):
    """Before the append and after it: another producer says the same in a new attempt, and the worker goes on."""
    await rig.send(prompt("[[tokens=40]]"), x_request_id="r", x_reply_mode=mode)
    rig.broker.fail_next(operation, ProducerWedgedError("out of order"), topic=rig.names.replies)
    await rig.serve_all()
    await rig.send(prompt("and then"), x_request_id="s")
    await rig.serve_all()
    assert rig.answer("r") == text_of("[[tokens=40]]")
    assert rig.answer("s") == text_of("and then")
    assert len(attempts(rig.replies("r"))) == (2 if operation == "ack" else 1)
    assert await rig.uncommitted() == {}


async def test_kept_text_is_sent_again_together_and_nothing_is_generated_again(rig, prompt, monkeypatch):
    """Wedged in the middle of a stream: the second attempt begins at seq 0 with all the text so far in one record."""
    engine = ScriptedEngine()
    sent, wedge = rig.broker.producer, iter([False, False, False, True])

    def producer():
        inner = sent()
        send = inner.send

        async def sending(topic, *args, **options):
            if topic == rig.names.replies and next(wedge, False):
                rig.broker.fail_next("ack", ProducerWedgedError("fenced"), topic=rig.names.replies)
            return await send(topic, *args, **options)

        inner.send = sending
        return inner

    monkeypatch.setattr(rig.broker, "producer", producer)
    await rig.send(prompt("[[tokens=64]]", stream=True), x_request_id="r")
    await rig.serve_all(engine, stream_coalesce_ms=60_000)
    replies = rig.replies("r")
    first, second = attempts(replies)
    assert [int(r.headers["x-seq"]) for r in replies if r.headers["x-attempt"] == first] == [0, 1, 2, 3]
    again = [r for r in replies if r.headers["x-attempt"] == second]
    assert [int(r.headers["x-seq"]) for r in again] == list(range(len(again)))
    assert len(again[0].body["choices"][0]["delta"]["content"]) >= 25
    assert rig.answer("r") == text_of("[[tokens=64]]")
    assert engine.stats().generated_tokens_total == 64


async def test_a_dead_letter_survives_a_wedged_producer(rig):
    """A second copy of a dead letter is harmless, a lost one is not."""
    await rig.send(b"not json", x_request_id="r")
    rig.broker.fail_next("ack", ProducerWedgedError("fenced"), topic=rig.names.dead_letter)
    await rig.serve_all()
    assert {letter.value for letter in rig.dead_letters()} == {b"not json"}
    assert await rig.uncommitted() == {}


async def test_answers_for_which_no_producer_works_become_dead_letters(rig, prompt):
    """One producer after the other is wedged on this topic: it ends, and the partition moves on."""
    await rig.broker.create_topics(NewTopic(SLOW))
    await rig.send(prompt(), x_request_id="r", x_reply_topic=SLOW)
    rig.broker.fail_next("send", ProducerWedgedError("fenced"), 100, topic=SLOW)
    await rig.serve_all()
    (letter,) = rig.dead_letters()
    assert dict(letter.headers)["__connect.errors.exception.class.name"] == b"ReplyUndeliverable"
    assert await rig.uncommitted() == {}


async def test_a_slow_reply_topic_hurts_only_its_own_request(rig, prompt):
    """Its send hangs: the others of its partition are answered, and it ends as a dead letter when its time is up."""
    await rig.broker.create_topics(NewTopic(SLOW))
    rig.broker.stall("send", topic=SLOW)
    await rig.send(prompt("slow"), x_request_id="slow", x_reply_topic=SLOW)
    for index in range(8):
        await rig.send(prompt(f"p{index}"), x_request_id=f"r{index}")
    async with asyncio.timeout(5):
        await rig.serve_all(reply_give_up_seconds=0.3)
    assert all(rig.answer(f"r{index}") == text_of(f"p{index}") for index in range(8))
    (letter,) = rig.dead_letters()
    assert dict(letter.headers)["x-request-id"] == b"slow"
    assert await rig.uncommitted() == {}


@pytest.mark.parametrize("operation", ["send", "admin"])
async def test_a_forbidden_reply_topic_hurts_only_its_own_request(rig, prompt, operation):
    """Neither a topic that may not be written nor one that may not be made stops the worker."""
    topic = rig.names.reply_for("r")
    app = rig.app()
    async with rig.running(app):
        await rig.send(prompt("before"), x_request_id="before")
        await rig.until_replied("before")
        rig.broker.fail_next(
            operation, TopicNotAvailableError("forbidden"), topic=topic if operation == "send" else None
        )
        await rig.send(prompt(), x_request_id="r", x_reply_topic=topic)
        await rig.until_replied("r", topic=rig.names.dead_letter)
        await rig.send(prompt("after"), x_request_id="after")
        await rig.until_replied("after")
    assert await rig.uncommitted() == {}


async def test_an_admin_client_without_an_answer_ends_as_a_dead_letter(rig, prompt):
    """The look-up of a named topic is bounded like its sends."""
    await rig.broker.create_topics(NewTopic(SLOW))
    app = rig.app(reply_give_up_seconds=0.2)
    async with rig.running(app):
        await rig.send(prompt("fine"), x_request_id="fine")
        await rig.until_replied("fine")
        rig.broker.stall("admin")
        await rig.send(prompt(), x_request_id="r", x_reply_topic=SLOW)
        await rig.until_replied("r", topic=rig.names.dead_letter)
    assert await rig.uncommitted() == {}


async def test_a_reply_that_is_too_large_says_what_it_used(rig, prompt):
    """The tokens were generated: the error carries their usage."""
    await rig.broker.create_topics(NewTopic("v4flash.replies.small", 1, {"max.message.bytes": "900"}))
    body = prompt("[[tokens=700]]", max_tokens=700)
    await rig.send(body, x_request_id="r", x_reply_topic="v4flash.replies.small")
    await rig.serve_all(max_output_tokens=1000)
    (reply,) = rig.replies("r", "v4flash.replies.small")
    assert reply.body["error"]["code"] == "reply_too_large"
    assert reply.body["usage"]["completion_tokens"] == 700


async def test_named_topics_have_a_producer_that_is_recycled():
    """Kafka's producers never forget a topic: after so many a fresh one takes over, and the old one is stopped."""
    broker, made = MemoryBroker(), []
    await broker.create_topics(*(NewTopic(f"t{index}") for index in range(5)), NewTopic("own"))

    def make():
        made.append(broker.producer())
        return made[-1]

    producers = ReplyProducers(make, frozenset({"own"}), max_named_topics=2)
    assert producers.of("own") is producers.own
    assert producers.of("t0") is producers.named
    named = producers.named
    await named.start()
    stopping = asyncio.create_task(named.run())
    broker.stall("send", topic="t1")
    held = asyncio.create_task(named.send("t1", b"held"))
    await asyncio.sleep(0)
    for index in (0, 0, 2, 3, 4):
        await named.send(f"t{index}", b"x")
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(made) == 3
    assert made[0]._running and not made[1]._running, "one still has a send on its way, the other has not"
    broker.unstall()
    await held
    for _ in range(3):
        await asyncio.sleep(0)
    assert not made[0]._running
    stopping.cancel()
    await named.stop()
    assert not any(producer._running for producer in made)


async def test_a_wedged_producer_is_replaced_once_for_all_its_senders():
    """Ten sends meet it; one replacement is made, and each sender is told."""
    broker, made = MemoryBroker(), []
    await broker.create_topics(NewTopic("t"))

    def make():
        made.append(broker.producer())
        return made[-1]

    producer = RenewingProducer(make)
    await producer.start()
    broker.stall("ack")
    sends = [asyncio.create_task(producer.send("t", b"x")) for _ in range(10)]
    await asyncio.sleep(0)
    broker.fail_next("ack", ProducerWedgedError("fenced"), 10)
    broker.unstall()
    outcomes = await asyncio.gather(*sends, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ProducerWedgedError] * 10
    assert len(made) == 2
    await ResendingProducer(producer).send("t", b"y")
    await producer.stop()
