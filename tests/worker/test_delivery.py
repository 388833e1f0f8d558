"""Workers that follow one another: what the commit says, and what it costs when it says nothing."""

import asyncio
import json
import time
from contextlib import suppress

from engine.scripted import ScriptedEngine
from worker.broker.api import BrokerUnavailableError, OffsetCommit, TopicNotAvailableError, TopicPartition
from worker.commit_metadata import CommitMetadata, Mark, MarkState, MetadataCodec
from worker.lease import done_record

SLOW = "[[tokens=64]]"


def codec() -> MetadataCodec:
    made = MetadataCodec()
    made.bind("memory")
    return made


class WatchedEngine(ScriptedEngine):
    """Says when it was asked `calls` times, and hangs on a prompt with the word, as a process that dies of it does."""

    def __init__(self, rate: float = 2000, *, calls: int = 1, word: str = "poison") -> None:
        super().__init__(tokens_per_second=rate)
        self.word, self.calls = word, calls
        self.died, self.asked = asyncio.Event(), asyncio.Event()
        self.company: list[int] = []

    async def generate(self, request):
        text = bytes(token for token in request.prompt_token_ids if token < 256).decode()
        self.company.append(self.stats().num_running)
        if len(self.company) >= self.calls:
            self.asked.set()
        if self.word in text:
            self.died.set()
            await asyncio.Event().wait()
        async for delta in super().generate(request):
            yield delta


async def vanish(task: asyncio.Task, app) -> None:
    """SIGKILL: nothing is committed and nobody is told. The group drops the member."""

    async def no_commit(*_: object, **__: object) -> None:
        raise BrokerUnavailableError("the process is gone")

    app.member.subscription._inner.commit = no_commit
    task.cancel()
    with suppress(asyncio.CancelledError, BaseExceptionGroup):
        await task


async def committed(rig, tp: TopicPartition) -> OffsetCommit:
    return rig.broker._cluster.group("workers").offsets[tp]


async def send_all(rig, prompt, texts: dict[str, str]) -> None:
    for request_id, text in texts.items():
        await rig.producer.send(
            "v4flash.prompts.standard",
            json.dumps(prompt(text)).encode(),
            headers=(("x-request-id", request_id.encode()),),
            partition=0,
        )


async def test_a_restart_answers_only_what_was_not_done(rig, prompt):
    """One slow prompt holds the watermark; the nine behind it are not answered again by the next worker."""
    await send_all(rig, prompt, {"slow": SLOW} | {f"r{i}": f"{i} [[tokens=3]]" for i in range(9)})
    app = rig.app(ScriptedEngine(tokens_per_second=20), grace_seconds=0.05)
    engine = ScriptedEngine()
    fast = [f"r{i}" for i in range(9)]
    task = asyncio.create_task(app.run())
    for request_id in fast:
        await rig.until_replied(request_id)
    app.request_stop()
    await task
    await rig.serve_all(engine)
    assert [len(rig.replies(request_id)) for request_id in fast] == [1] * 9
    assert rig.answer("slow")
    assert engine.stats().generated_tokens_total == 64
    assert await rig.uncommitted() == {}


async def test_foreign_metadata_costs_duplicates_and_loses_nothing(rig, prompt):
    """A mirror copied it under a lower offset: everything from there is answered, done or not."""
    ids = [f"r{i}" for i in range(6)]
    await send_all(rig, prompt, {request_id: request_id for request_id in ids})
    tp = TopicPartition("v4flash.prompts.standard", 0)
    text = codec().encode(tp, 4, CommitMetadata(frozenset({4, 5})))
    rig.broker._cluster.group("workers").offsets[tp] = OffsetCommit(1, text)
    await rig.serve_all()
    assert [len(rig.replies(request_id)) for request_id in ids] == [0, 1, 1, 1, 1, 1]
    assert await rig.uncommitted() == {}


async def test_marks_are_committed_before_the_work_begins(rig, prompt):
    """When a prompt reaches the engine the broker knows that it runs; a graceful end leaves no mark."""
    tp = TopicPartition("v4flash.prompts.standard", 0)
    seen: list[bool] = []

    class Asking(ScriptedEngine):
        async def generate(self, request):
            commit = rig.broker._cluster.group("workers").offsets.get(tp)
            found = codec().decode(tp, commit.metadata, base=commit.offset, end=100) if commit else CommitMetadata()
            seen.append(bool(found.marks))
            async for delta in super().generate(request):
                yield delta

    await send_all(rig, prompt, {"a": "a", "b": "b"})
    await rig.serve_all(Asking())
    assert seen == [True, True]
    assert await committed(rig, tp) == OffsetCommit(2, "")


async def test_exactly_the_killer_is_quarantined(rig, prompt):
    """Workers die one after another of one prompt among sixteen innocents: it is put aside, they are all answered."""
    texts = {f"r{i}": f"innocent {i}" for i in range(16)}
    await send_all(rig, prompt, dict(list(texts.items())[:7]) | {"killer": "poison"} | dict(list(texts.items())[7:]))
    deaths = 0
    while True:
        engine = WatchedEngine()
        app = rig.app(engine)
        task = asyncio.create_task(app.run(until_end=True))
        died = asyncio.create_task(engine.died.wait())
        async with asyncio.timeout(10):
            await asyncio.wait([task, died], return_when=asyncio.FIRST_COMPLETED)
        if not engine.died.is_set():
            died.cancel()
            await task
            break
        deaths += 1
        await vanish(task, app)
        assert deaths <= 5
    assert deaths == 5  # twice with the others, three times alone
    assert rig.error("killer") == "quarantined"
    (letter,) = rig.dead_letters()
    assert dict(letter.headers)["x-request-id"] == b"killer"
    assert dict(letter.headers)["__connect.errors.exception.class.name"] == b"PromptQuarantined"
    assert all(rig.answer(request_id) for request_id in texts)
    assert await rig.uncommitted() == {}


async def test_five_kills_of_a_full_batch_quarantine_nothing(rig, prompt):
    """Stopped from outside again and again, with everything in flight: all are answered in the end."""
    ids = [f"r{i}" for i in range(16)]
    await send_all(rig, prompt, dict.fromkeys(ids, SLOW))
    for calls in (16, 16, 1, 1, 1):  # what two vanished workers had in work runs alone
        engine = WatchedEngine(5, calls=calls)
        app = rig.app(engine)
        task = asyncio.create_task(app.run())
        async with asyncio.timeout(10):
            await engine.asked.wait()
        await vanish(task, app)
    await rig.serve_all()
    assert rig.dead_letters() == []
    assert all(rig.answer(request_id) for request_id in ids)
    assert await rig.uncommitted() == {}


async def test_a_prompt_of_two_vanished_workers_runs_alone(rig, prompt):
    """Nothing else is in the engine while it is; afterwards the others run together."""
    await send_all(rig, prompt, {f"r{i}": f"prompt {i}" for i in range(8)})
    tp = TopicPartition("v4flash.prompts.standard", 0)
    marks = {at: Mark(MarkState.TOGETHER, 0, 1) for at in (2, 5)}
    rig.broker._cluster.group("workers").offsets[tp] = OffsetCommit(
        0, codec().encode(tp, 0, CommitMetadata(marks=marks))
    )
    engine = WatchedEngine(word="nobody")
    await rig.serve_all(engine)
    assert engine.company[:3] == [0, 0, 0]
    assert all(rig.answer(f"r{i}") for i in range(8))


async def test_a_rebalance_in_mid_stream_makes_no_second_attempt(rig, prompt):
    """The first worker answers what it has begun, also where the partition is now another's, who waits for its word."""
    engines = WatchedEngine(200, calls=8), ScriptedEngine()
    first, second = map(rig.app, engines)
    ids = [f"r{i}" for i in range(8)]
    async with rig.running(first):
        for i, request_id in enumerate(ids):
            value = json.dumps(prompt("[[tokens=60]]")).encode()
            headers = (("x-request-id", request_id.encode()),)
            await rig.producer.send("v4flash.prompts.standard", value, headers=headers, partition=i % 2)
        async with asyncio.timeout(10):
            await engines[0].asked.wait()
        async with rig.running(second):
            for request_id in ids:
                await rig.until_replied(request_id)
    assert engines[1].stats().generated_tokens_total == 0
    assert [len(rig.replies(request_id)) for request_id in ids] == [1] * 8


async def leased(rig, prompt, until_ms: int) -> None:
    await send_all(rig, prompt, {"r": "leased"})
    tp = TopicPartition("v4flash.prompts.standard", 0)
    text = codec().encode(tp, 0, CommitMetadata(leases={0: until_ms}))
    rig.broker._cluster.group("workers").offsets[tp] = OffsetCommit(0, text)


async def test_a_leased_prompt_is_left_to_its_owner_who_said_that_it_is_done(rig, prompt):
    """Whether the word came before the prompt was read or after."""
    await leased(rig, prompt, 1 << 42)
    (record,) = rig.broker.records("v4flash.prompts.standard")
    key, value = done_record(record)
    await rig.producer.send(rig.names.control, value, key=key)
    engine = ScriptedEngine()
    await rig.serve_all(engine)
    assert engine.stats().generated_tokens_total == 0
    assert await rig.uncommitted() == {}


async def test_a_lease_that_ran_out_or_lasts_absurdly_long_does_not_hold_a_prompt(rig, prompt):
    """A clock that is hours ahead made it: it is believed for the length of our own leases."""
    await leased(rig, prompt, 1 << 42)
    await rig.serve_all(lease_seconds=0.1)
    assert rig.answer("r")
    assert await rig.uncommitted() == {}


async def test_a_commit_that_is_not_taken_does_not_stop_the_work(rig, prompt):
    """Marks are worth a second and no more; they follow when the coordinator is back."""
    app = rig.app()
    async with rig.running(app):
        rig.broker.fail_next("commit", BrokerUnavailableError("no coordinator"), 2)
        await send_all(rig, prompt, {"r": "text"})
        await rig.until_replied("r")
    assert rig.answer("r")
    assert await rig.uncommitted() == {}


async def test_a_prompt_topic_that_takes_no_commit_does_not_end_the_worker(rig, prompt):
    """It was deleted under us: until the group knows, its commits fail, and those of the others follow."""
    app = rig.app()
    async with rig.running(app):
        rig.broker.fail_next("commit", TopicNotAvailableError("deleted"), 2)
        await send_all(rig, prompt, {"r": "text"})
        offsets, tp = rig.broker._cluster.group("workers").offsets, TopicPartition("v4flash.prompts.standard", 0)
        assert await rig.broker._cluster.changes.wait_for(lambda: tp in offsets and offsets[tp].offset == 1, 5.0)
    assert await rig.uncommitted() == {}


async def test_a_prompt_that_runs_through_a_rebalance_is_answered_once_and_its_new_owner_is_told(rig, prompt):
    """The first worker goes on with it; the second one holds it, hears that it is done, and commits it long before the
    lease ends."""
    first, second = rig.app(ScriptedEngine(tokens_per_second=40)), rig.app()
    moved = TopicPartition("v4flash.prompts.standard", 1)
    async with rig.running(first):
        await rig.producer.send(
            moved.topic, json.dumps(prompt(SLOW, stream=True)).encode(), headers=(("x-request-id", b"r"),), partition=1
        )
        await rig.until_replied("r")
        async with rig.running(second):
            async with asyncio.timeout(10):
                while (await rig.uncommitted()).get(moved):
                    await rig.broker._cluster.changes.wait_for(lambda: False, 0.02)
            assert moved in second.member.subscription.assignment()
    assert sum("x-final" in reply.headers for reply in rig.replies("r")) == 1
    assert len(rig.answer("r")) == 64


async def test_a_prompt_whose_end_was_told_before_it_was_read_is_committed_and_not_answered_again(rig, prompt):
    """Its former owner was quicker than the new one: nothing else need happen for the commit to pass it."""
    tp = TopicPartition("v4flash.prompts.standard", 0)
    await send_all(rig, prompt, {"r": "r"})
    (record,) = rig.broker.records(tp.topic)
    leased = CommitMetadata(leases={0: int(time.time() * 1000) + 60_000})
    rig.broker._cluster.group("workers").offsets[tp] = OffsetCommit(0, codec().encode(tp, 0, leased))
    key, value = done_record(record)
    await rig.producer.send(rig.names.control, value, key=key)
    async with rig.running(rig.app()):
        offsets = rig.broker._cluster.group("workers").offsets
        assert await rig.broker._cluster.changes.wait_for(lambda: offsets[tp].offset == 1, 5.0)
    assert rig.replies("r") == []


async def test_a_prompt_that_is_known_as_done_before_it_is_read_is_passed_by_the_commit(rig, prompt):
    """The commit of a former owner says so: nothing else need happen on the partition."""
    tp = TopicPartition("v4flash.prompts.standard", 0)
    await send_all(rig, prompt, {"r": "r"})
    text = codec().encode(tp, 0, CommitMetadata(done=frozenset({0})))
    rig.broker._cluster.group("workers").offsets[tp] = OffsetCommit(0, text)
    async with rig.running(rig.app()):
        offsets = rig.broker._cluster.group("workers").offsets
        assert await rig.broker._cluster.changes.wait_for(lambda: offsets[tp].offset == 1, 5.0)
    assert rig.replies("r") == []
