import pytest

from engine.api import ChatMessage
from engine.scripted import ScriptedEngine, scripted_answer
from worker.broker.api import NewTopic


@pytest.mark.parametrize("cls", ["urgent", "standard", "bulk"])
@pytest.mark.parametrize("mode, last", [("final", 0), ("chunks", 1), ("both", 1)])
async def test_every_class_is_answered_in_every_mode(rig, prompt, cls, mode, last):
    """Seq has no gap, one record is terminal and last, and the text is the engine's."""
    await rig.send(prompt("tell me"), cls, x_request_id="r", x_reply_mode=mode)
    await rig.serve_all()
    replies = rig.replies("r")
    assert [int(reply.headers["x-seq"]) for reply in replies] == list(range(len(replies)))
    assert [reply.headers.get("x-final") for reply in replies] == [None] * (len(replies) - 1) + [b"1"]
    assert (len(replies) > 1) == bool(last)
    ids = ScriptedEngine().encode_chat([ChatMessage("user", "tell me")])
    assert rig.answer("r") == scripted_answer(ids, 64)
    assert await rig.uncommitted() == {}


async def test_stream_true_means_chunks_except_for_spring(rig, prompt):
    """Spring's template takes the first record as the answer."""
    await rig.send(prompt(stream=True), x_request_id="openai")
    await rig.send(prompt(stream=True), x_request_id="spring", kafka_correlationId=b"")
    await rig.producer.send(
        "v4flash.prompts.standard",
        b'{"messages":[{"role":"user","content":"hi"}],"stream":true}',
        headers=(("x-request-id", b"template"), ("kafka_correlationId", bytes(16))),
    )
    await rig.serve_all()
    assert len(rig.replies("openai")) > 1
    (reply,) = rig.replies("template")
    assert reply.headers["kafka_correlationId"] == bytes(16)


async def test_the_first_token_is_sent_at_once_and_later_ones_together(rig, prompt):
    """64 tokens, one first, then eight in a chunk."""
    await rig.send(prompt("[[tokens=64]]", stream=True), x_request_id="r")
    await rig.serve_all(stream_coalesce_ms=60_000)
    replies = rig.replies("r")
    assert len(replies[0].body["choices"][0]["delta"]["content"]) == 1
    assert len(replies) == 9


async def test_a_named_topic_and_partition_get_the_replies(rig, prompt):
    """The client's own topic, inside the allow-list."""
    await rig.broker.create_topics(NewTopic("v4flash.replies.mine", 3))
    await rig.send(prompt(), x_request_id="r", x_reply_topic="v4flash.replies.mine", x_reply_partition="2")
    await rig.serve_all()
    assert rig.answer("r", "v4flash.replies.mine")
    assert {reply.record.partition for reply in rig.replies("r", "v4flash.replies.mine")} == {2}


async def test_a_partition_that_is_not_there_is_refused(rig, prompt):
    """It would stall the send."""
    await rig.send(prompt(), x_request_id="r", x_reply_topic="v4flash.replies", x_reply_partition="7")
    await rig.serve_all()
    assert rig.error("r") == "invalid_reply_topic"


async def test_a_topic_of_one_request_is_made_on_demand(rig, prompt):
    """Nobody has to create it before."""
    topic = rig.names.reply_for("r")
    await rig.send(prompt(), x_request_id="r", x_reply_topic=topic)
    await rig.serve_all()
    assert rig.answer("r", topic)


async def test_a_reply_that_is_too_large_becomes_an_error(rig, prompt):
    """The client is told, the partition is not wedged."""
    await rig.broker.create_topics(NewTopic("v4flash.replies.small", 1, {"max.message.bytes": "900"}))
    await rig.send(prompt("[[tokens=700]]", max_tokens=700), x_request_id="r", x_reply_topic="v4flash.replies.small")
    await rig.serve_all(max_output_tokens=2000)
    assert rig.error("r", "v4flash.replies.small") == "reply_too_large"
    assert await rig.uncommitted() == {}


async def test_several_choices_each_end_once(rig, prompt):
    """n choices in a stream have a role, a text and one finish reason each."""
    await rig.send(prompt(n=3, stream=True), x_request_id="r")
    await rig.serve_all()
    choices = [reply.body["choices"][0] for reply in rig.replies("r")]
    assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1, 2]
    assert sorted(c["index"] for c in choices if c["delta"].get("role")) == [0, 1, 2]
