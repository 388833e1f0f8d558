import asyncio

import pytest

from engine.api import ChatMessage, Delta, FinishReason
from engine.scripted import ScriptedEngine, scripted_answer
from topics.replies import ReplyContext
from topics.routes import Route, RouteTable
from worker.broker.api import NewTopic
from worker.clock import SystemClock
from worker.replies.api import ReplyUndeliverable
from worker.replies.stream import CoalescePolicy, StreamReplier


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


async def test_headers_of_a_route_stand_on_its_answers_and_errors_and_on_no_others(rig, prompt):
    """Spring's reader finds its type in them, whatever came."""
    typed = Route(topics=(rig.names.prompts("standard"),), reply_headers={"__TypeId__": "completion"})
    plain = Route(topics=(rig.names.prompts("bulk"),))
    for cls in ("standard", "bulk"):
        await rig.send(prompt(), cls, x_request_id=f"{cls} answer")
        await rig.send(b"no JSON", cls, x_request_id=f"{cls} error")
    await rig.serve_all(routes=RouteTable(routes=(typed, plain)))
    for end in ("answer", "error"):
        (reply,), (other,) = rig.replies(f"standard {end}"), rig.replies(f"bulk {end}")
        assert reply.headers["__TypeId__"] == b"completion"
        assert "__TypeId__" not in other.headers


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
    assert rig.replies("r")[0].body["error"]["param"] == "x-reply-partition"


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


class Turnstile:
    """A clock for the scripted engine that lets so many tokens through, and the rest when it opens."""

    def __init__(self, num_tokens: int) -> None:
        self._left = num_tokens
        self.opened = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self._left -= 1
        if self._left < 0:
            await self.opened.wait()


async def test_held_text_is_sent_in_its_time_although_no_token_follows(rig, prompt):
    """The second and third token wait for more to send together, and not for ever."""
    gate = Turnstile(3)
    app = rig.app(ScriptedEngine(sleep=gate), stream_coalesce_ms=30, stream_coalesce_tokens=100)
    async with rig.running(app):
        await rig.send(prompt("[[tokens=6]]", stream=True), x_request_id="r")
        await rig.until_replied("r", 2)
        assert len(rig.replies("r")[1].body["choices"][0]["delta"]["content"]) == 2
        gate.opened.set()
        await rig.until_replied("r", 3)
    assert [int(reply.headers["x-seq"]) for reply in rig.replies("r")] == list(range(len(rig.replies("r"))))
    assert len(rig.answer("r")) == 6


class FailingSink:
    """Takes one record, then none."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.failed = asyncio.Event()

    async def send(self, record: object) -> None:
        if self.num_taken:
            self.failed.set()
            raise ReplyUndeliverable
        self.num_taken += 1


async def test_what_the_timer_meets_is_raised_by_the_next_call():
    """A failure to send held text is not lost."""
    sink = FailingSink()
    context = ReplyContext("r", "a", "/v1/chat/completions", "m", 0)
    replier = StreamReplier(context, sink, clock=SystemClock(), policy=CoalescePolicy(100, 0.01), whole=False)
    await replier.send(Delta(0, "a", (1,)))
    await replier.send(Delta(0, "b", (2,)))
    await sink.failed.wait()
    with pytest.raises(ReplyUndeliverable):
        await replier.send(Delta(0, "c", (3,)))
    await replier.close()


class Saying(ScriptedEngine):
    """Says a text, one byte a token, whatever the prompt."""

    def __init__(self, text: str, **how: object) -> None:
        super().__init__(**how)
        self._says = text

    def _choice(self, request, index):
        choice = super()._choice(request, index)
        choice.tokens, choice.end = self._says.encode(), FinishReason.STOP
        return choice


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8])
@pytest.mark.parametrize("mode", ["final", "chunks", "both"])
async def test_a_character_of_several_tokens_is_never_split(rig, prompt, mode, num_tokens):
    """Emoji of four bytes, one of them of several code points: no chunk shows half of one, the whole text comes."""
    said = "ok 🙂 née 👩‍🚀!"
    await rig.send(prompt(), x_request_id="r", x_reply_mode=mode)
    await rig.serve_all(Saying(said), stream_coalesce_ms=60_000, stream_coalesce_tokens=num_tokens)
    assert rig.answer("r") == said
    assert not any("\ufffd" in reply.record.value.decode() for reply in rig.replies("r"))


@pytest.mark.parametrize("mode", ["final", "chunks", "both"])
async def test_a_stop_string_over_several_chunks_is_never_shown(rig, prompt, mode):
    """One token a chunk: a beginning that turns out not to be the stop string is shown, the stop string is not."""
    await rig.send(prompt(stop=["END🙂"]), x_request_id="r", x_reply_mode=mode)
    await rig.serve_all(Saying("an ENDing, then END🙂 and more"), stream_coalesce_tokens=1)
    assert rig.answer("r") == "an ENDing, then "
    assert rig.replies("r")[-1].body["choices"][0]["finish_reason"] == "stop"
    shown = "".join(
        reply.body["choices"][0]["delta"].get("content", "")
        for reply in rig.replies("r")
        if "delta" in reply.body["choices"][0]
    )
    assert shown in ("", "an ENDing, then ")
