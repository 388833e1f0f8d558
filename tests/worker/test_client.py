"""The client library, against a worker on the broker in memory."""

import asyncio
import json

import pytest

from engine.api import PriorityClass
from engine.scripted import ScriptedEngine
from topics.attempts import AttemptReader, EventKind
from topics.errors import ErrorCode
from topics.replies import ReplyContext, chunk_record, error_record
from worker.broker.api import BrokerUnavailableError, TopicNotAvailableError
from worker.client import AnswerChangedError, Client, NoAnswerError, Prompt, RequestFailedError

CONTEXT = ReplyContext("r", "one", "/v1/chat/completions", "m", 0)


@pytest.fixture
async def client(rig):
    async with Client(rig.broker, rig.names) as client:
        yield client


async def test_many_prompts_at_once_have_each_their_own_answer(rig, client):
    """One reader serves them all; a stream's pieces are the answer."""
    async with rig.running(rig.app()):
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(client.ask(Prompt(f"hello {i}", max_tokens=16))) for i in range(12)]
        again = await client.ask(Prompt("hello 3", max_tokens=16), timeout_seconds=10)
        pieces = [piece async for piece in client.stream(Prompt("hello 3", max_tokens=16))]
    answers = [task.result() for task in asked]
    assert len({answer.request_id for answer in answers}) == 12
    assert answers[3].text == again.text == "".join(pieces)
    assert len(pieces) > 1
    assert again.finish_reasons == {0: "length"}
    assert again.usage["completion_tokens"] == 16


async def test_a_prompt_may_be_a_conversation_with_fields_of_its_own(rig, client):
    """What `body` says counts; key and time to live stand on the record."""
    prompt = Prompt(
        "",
        PriorityClass.BULK,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        body={"max_tokens": 3, "n": 2},
        key=b"session",
        ttl_seconds=60,
    )
    async with rig.running(rig.app()):
        answer = await client.ask(prompt)
    assert answer.texts.keys() == {0, 1}
    record = next(one for one in rig.broker.records(rig.names.prompts("bulk")))
    assert record.key == b"session"
    assert dict(record.headers)["x-ttl-ms"] == b"60000"
    assert json.loads(record.value)["n"] == 2


async def test_an_error_of_the_workers_says_whether_to_ask_again(rig, client):
    """Refused for good, and refused for now with the time to wait."""
    async with rig.running(rig.app()):
        with pytest.raises(RequestFailedError, match="invalid_value: max_tokens") as refused:
            await client.ask(Prompt("hello", max_tokens=0))
    assert (refused.value.code, refused.value.param, refused.value.retriable) == ("invalid_value", "max_tokens", False)
    quota = {"*": {"requests_per_second": 0.01}}
    async with rig.running(rig.app(tenant_quotas=quota)):
        await client.ask(Prompt("hello"))
        with pytest.raises(RequestFailedError) as limited:
            await client.ask(Prompt("hello"))
    assert limited.value.retriable
    assert 0 < limited.value.retry_after_ms <= 100_000


async def test_a_cancelled_request_ends_and_who_may_not_write_control_asks_behind_the_prompt(rig, client):
    """Both ways end the stream with the error of the workers."""
    async with rig.running(rig.app(first_token_timeout_ms=60_000)):
        for refused in (False, True):
            prompt = Prompt("[[slow]] [[tokens=60]]", PriorityClass.URGENT)
            with pytest.raises(RequestFailedError, match="cancelled"):
                async for _ in client.stream(prompt, timeout_seconds=20):
                    if refused:
                        rig.broker.fail_next("send", TopicNotAvailableError("no ACL"), topic=rig.names.control)
                        refused = False
                    await client.cancel(prompt.request_id, priority=PriorityClass.URGENT)
    assert any(record.value is None for record in rig.broker.records(rig.names.prompts("urgent")))


async def test_time_that_is_up_ends_only_the_wait(client):
    """The error can be retried; a request that is followed cannot be followed twice."""
    with pytest.raises(NoAnswerError):
        await client.ask(Prompt("hello"), timeout_seconds=0.01)
    prompt = Prompt("hello")
    following = asyncio.create_task(client.ask(prompt, timeout_seconds=0.2))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="followed already"):
        await client.ask(prompt)
    with pytest.raises(NoAnswerError):
        await following


async def say(rig, *records) -> None:
    for value, headers in records:
        await rig.producer.send(rig.names.replies, value, headers=headers, partition=0)


def chunk(attempt: str, seq: int, text: str, *, final: bool = False):
    context = ReplyContext("r", attempt, CONTEXT.operation, "m", 0)
    reason = "stop" if final else None
    return chunk_record(context, seq, index=0, text=text, role_first=seq == 0, finish_reason=reason, final=final)


async def test_a_stream_goes_on_where_the_first_attempt_was(rig, client):
    """What was given out is not given again; events show the second attempt as one."""
    prompt, pieces, reader = Prompt("hello", request_id="r"), [], AttemptReader()
    stream = client.stream(prompt, timeout_seconds=10)
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    await say(rig, chunk("one", 0, "The sky"))
    pieces.append(await first)
    await say(rig, chunk("two", 0, "The "), chunk("two", 1, "sky is"), chunk("two", 2, " blue", final=True))
    pieces += [piece async for piece in stream]
    assert pieces[0] == "The sky"
    assert "".join(pieces) == "The sky is blue"
    for record in rig.broker.records(rig.names.replies):
        reader.feed(record.headers, record.value, record.offset)
    assert reader.text == "The sky is blue"


async def test_a_second_attempt_that_says_otherwise_is_an_error_of_its_own(rig, client):
    """Text that was given out cannot be taken back."""
    stream = client.stream(Prompt("hello", request_id="r"), timeout_seconds=10)
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    await say(rig, chunk("one", 0, "The sky"))
    assert await first == "The sky"
    await say(rig, chunk("two", 0, "A sky"))
    with pytest.raises(AnswerChangedError) as changed:
        await anext(stream)
    assert changed.value.retriable


async def test_events_tell_of_attempts_and_records_of_others_are_passed(rig, client):
    """For clients that can take text back: SHOW begins anew."""
    prompt, kinds = Prompt("hello", request_id="r"), []

    async def follow() -> None:
        kinds.extend([event.kind async for event in client.events(prompt, timeout_seconds=10)])

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    other = error_record(
        ReplyContext("other", "x", CONTEXT.operation, "m", 0), 0, code=ErrorCode.CANCELLED, message="no"
    )
    await say(rig, other, (b"{", ()), chunk("one", 0, "a"), chunk("two", 0, "b"), chunk("two", 1, "", final=True))
    await following
    assert kinds == [EventKind.SHOW, EventKind.TEXT, EventKind.SHOW, EventKind.TEXT, EventKind.COMPLETE]


async def test_a_broker_that_is_lost_ends_every_wait(rig, client):
    """With the broker's error, also for whoever asks later."""
    waiting = asyncio.create_task(client.ask(Prompt("hello")))
    await asyncio.sleep(0)
    rig.broker.fail_next("poll", BrokerUnavailableError("away"))
    with pytest.raises(BrokerUnavailableError):
        await waiting
    with pytest.raises(BrokerUnavailableError):
        await client.ask(Prompt("hello"))


def test_a_client_of_a_cluster_connects_when_it_is_entered() -> None:
    """Making one costs nothing and reaches nobody."""
    assert Client.connect("127.0.0.1:1", prefix="mine")._names.prefix == "mine"


async def test_the_engine_of_tests_serves_a_client_without_kafka(rig, client):
    """As in a service's own tests: a worker, a client, no broker to start."""
    async with rig.running(rig.app(ScriptedEngine())):
        assert (await client.ask(Prompt("hello"), timeout_seconds=10)).text
