import asyncio

import pytest

from engine.errors import EngineDeadError
from engine.scripted import ScriptedEngine
from worker.broker.api import BrokerUnavailableError, TopicNotAvailableError, TopicPartition


async def test_until_end_answers_and_commits_everything(rig, prompt):
    """Sixty prompts of three classes, then the worker leaves by itself."""
    ids = [f"r{i}" for i in range(60)]
    for i, request_id in enumerate(ids):
        await rig.send(prompt(f"prompt {i}"), ("urgent", "standard", "bulk")[i % 3], x_request_id=request_id)
    await rig.serve_all(max_inflight_requests=8)
    assert all(rig.answer(request_id) for request_id in ids)
    assert await rig.uncommitted() == {}


async def test_a_stop_finishes_what_runs_and_takes_nothing_new(rig, prompt):
    """The drain: the running stream ends whole, a later prompt stays for the next worker."""
    app = rig.app(ScriptedEngine(tokens_per_second=200))
    await rig.send(prompt("[[tokens=40]]", stream=True), x_request_id="running")
    async with rig.running(app):
        await rig.until_replied("running")
        app.request_stop()
        await asyncio.sleep(0)
    await rig.send(prompt(), x_request_id="later")
    assert len(rig.answer("running")) == 40
    assert rig.replies("later") == []
    await rig.serve_all()
    assert rig.answer("later")


async def test_what_outlives_the_grace_is_aborted_and_redelivered(rig, prompt):
    """No terminal record, no commit; the next worker answers."""
    app = rig.app(ScriptedEngine(tokens_per_second=5), grace_seconds=0.05)
    await rig.send(prompt("[[tokens=64]]", stream=True), x_request_id="slow")
    async with rig.running(app):
        await rig.until_replied("slow")
    assert all("x-final" not in reply.headers for reply in rig.replies("slow"))
    assert sum((await rig.uncommitted()).values()) == 1
    await rig.serve_all()
    assert len(rig.answer("slow")) == 64
    assert await rig.uncommitted() == {}


async def test_an_abrupt_end_redelivers_and_the_second_attempt_says_the_same(rig, prompt):
    """Two attempts in the partition, one complete answer by the attempt rule."""
    task = asyncio.create_task(rig.app(ScriptedEngine(tokens_per_second=20)).run())
    await rig.send(prompt("[[tokens=30]]", stream=True, temperature=1), x_request_id="r")
    await rig.until_replied("r")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.serve_all()
    assert len({reply.headers["x-attempt"] for reply in rig.replies("r")}) == 2
    assert len(rig.answer("r")) == 30


async def test_a_dead_engine_tells_no_client_and_ends_the_worker(rig, prompt):
    """What ran stays uncommitted, without a terminal record: the next worker answers it."""
    engine = ScriptedEngine(tokens_per_second=20)
    task = asyncio.create_task(rig.app(engine).run())
    await rig.send(prompt("[[tokens=64]]", stream=True), x_request_id="r")
    await rig.until_replied("r")
    await engine.close()
    with pytest.raises(BaseExceptionGroup) as ended:
        await asyncio.wait_for(task, 10)
    assert ended.group_contains(EngineDeadError)
    assert all("x-final" not in reply.headers for reply in rig.replies("r"))
    assert sum((await rig.uncommitted()).values()) == 1
    await rig.serve_all()
    assert len(rig.answer("r")) == 64


async def test_a_stream_without_tokens_is_ended_with_an_error(rig, prompt):
    """A stalled engine does not hold the client for ever."""
    await rig.send(prompt("[[stall]]"), x_request_id="r")
    await rig.serve_all(first_token_timeout_ms=30)
    assert rig.error("r") == "streaming_timeout"
    assert rig.replies("r")[0].headers["x-retriable"] == b"1"


async def test_a_deadline_ends_a_running_stream(rig, prompt):
    """Tokens were sent, then the time was up: the error is the next in sequence."""
    await rig.send(prompt("[[tokens=64]]", stream=True), x_request_id="r", x_ttl_ms="300")
    await rig.serve_all(ScriptedEngine(tokens_per_second=20))
    replies = rig.replies("r")
    assert replies[-1].body["error"]["code"] == "deadline_exceeded"
    assert [int(reply.headers["x-seq"]) for reply in replies] == list(range(len(replies)))


async def test_a_send_that_fails_for_a_moment_is_sent_again(rig, prompt):
    """The reply arrives once the broker is back."""
    await rig.send(prompt(), x_request_id="r")
    rig.broker.fail_next("send", BrokerUnavailableError("away"), 2, topic=rig.names.replies)
    await rig.serve_all()
    assert rig.answer("r")


async def test_a_reply_that_cannot_be_delivered_becomes_a_dead_letter(rig, prompt):
    """An answer that nobody can take does not wedge the partition."""
    await rig.send(prompt(), x_request_id="r")
    rig.broker.fail_next("send", TopicNotAvailableError("deleted"), topic=rig.names.replies)
    await rig.serve_all()
    (letter,) = rig.dead_letters()
    assert dict(letter.headers)["__connect.errors.exception.class.name"] == b"ReplyUndeliverable"
    assert await rig.uncommitted() == {}


async def test_two_workers_share_the_prompts_and_answer_each_once(rig, prompt):
    """A rebalance while prompts run loses none and repeats none."""
    ids = [f"r{i}" for i in range(30)]
    first, second = rig.app(ScriptedEngine(tokens_per_second=2000)), rig.app(ScriptedEngine(tokens_per_second=2000))
    async with rig.running(first):
        for request_id in ids[:15]:
            await rig.send(prompt(request_id), x_request_id=request_id)
        async with rig.running(second):
            for request_id in ids[15:]:
                await rig.send(prompt(request_id), x_request_id=request_id)
            for request_id in ids:
                await rig.until_replied(request_id)
    assert all(rig.answer(request_id) for request_id in ids)
    assert await rig.uncommitted() == {}


async def test_a_stop_does_not_wait_for_a_broker_that_takes_no_commit(rig, prompt):
    """The last commit is bounded by the grace; the prompt is answered and stays for redelivery."""
    app = rig.app(grace_seconds=0.1)
    async with asyncio.timeout(5):
        async with rig.running(app):
            rig.broker.stall("commit")
            await rig.send(prompt(), x_request_id="r")
            await rig.until_replied("r")
    assert rig.answer("r")
    assert await rig.uncommitted() != {}


async def test_until_end_fails_when_its_last_commit_is_not_taken(rig, prompt):
    """Exit code 0 says that all is committed."""
    await rig.send(prompt(), x_request_id="r")
    rig.broker.stall("commit")
    with pytest.raises(BrokerUnavailableError):
        await rig.serve_all(grace_seconds=0.1)


async def test_until_end_ends_when_the_last_offsets_of_a_partition_are_a_gap(rig, prompt, monkeypatch):
    """Compaction and control records leave offsets that no poll ever brings, also in a partition without a record."""
    monkeypatch.setattr("worker.intake.GAP_SECONDS", 0.05)
    tp = await rig.send(prompt(), x_request_id="r")
    rig.broker.leave_gap(tp, 3)
    rig.broker.leave_gap(TopicPartition(rig.names.prompts("bulk"), 1), 2)
    await rig.serve_all()
    assert rig.answer("r")
