"""How intake follows the engine."""

import asyncio
import json

import pytest

from engine.scripted import ScriptedEngine
from worker.broker.api import TopicNotAvailableError, TopicPartition, UnreadableRecordsError
from worker.broker.memory_consumer import MemoryConsumer


async def test_prompts_beyond_the_cache_are_left_in_their_topic_and_answered_later(rig, prompt):
    """A small cache: bulk pauses while it is full, and every prompt is answered in the end."""
    ids = [f"r{i}" for i in range(40)]
    for i, request_id in enumerate(ids):
        await rig.send(prompt(f"[[tokens=32]] {i}"), ("urgent", "standard", "bulk")[i % 3], x_request_id=request_id)
    await rig.serve_all(ScriptedEngine(num_blocks=16), backpressure_dwell_seconds=0.01)
    assert all(rig.answer(request_id) for request_id in ids)
    assert await rig.uncommitted() == {}


async def test_one_stuck_prompt_stops_its_partition_and_no_other(rig, prompt):
    """The window of a partition is full; urgent prompts go on being answered."""
    async with rig.running(rig.app(max_inflight_per_partition=1, grace_seconds=0.05)):
        for i in range(4):
            await rig.send(prompt("[[stall]]"), "bulk", x_request_id=f"stuck{i}")
        for i in range(6):
            await rig.send(prompt(), "urgent", x_request_id=f"u{i}")
        for i in range(6):
            await rig.until_replied(f"u{i}")
    assert sum((await rig.uncommitted()).values()) == 4


@pytest.mark.parametrize("error", [UnreadableRecordsError("bad CRC"), TopicNotAvailableError("no right to read")])
async def test_records_that_cannot_be_read_stop_their_partition_and_are_tried_again(rig, prompt, monkeypatch, error):
    """The worker lives, says where, passes nothing, and goes on when they can be read."""
    monkeypatch.setattr("worker.intake.AGAIN_SECONDS", 0.1)
    seen: list[str | None] = []
    poll, failures = MemoryConsumer.poll, 3

    async def failing(self, tp, max_records, timeout_seconds):
        nonlocal failures
        if tp == TopicPartition("v4flash.prompts.standard", 0) and failures:
            seen.append(app.unready)
            failures -= 1
            raise error
        return await poll(self, tp, max_records, timeout_seconds)

    monkeypatch.setattr(MemoryConsumer, "poll", failing)
    app = rig.app()
    for i in range(8):
        await rig.producer.send("v4flash.prompts.standard", json.dumps(prompt()).encode(), partition=i % 2)
    async with asyncio.timeout(10):
        await app.run(until_end=True)
    assert seen == [None, *["records cannot be read: v4flash.prompts.standard[0]"] * 2]
    assert app.member.tracker.num_running == 0
    assert len(rig.broker.records(rig.names.replies)) == 8
    assert await rig.uncommitted() == {}


class Bystander:
    """The listener of a member that takes partitions and does nothing with them."""

    async def on_revoked(self, revoked) -> None: ...

    async def on_assigned(self, assigned) -> None: ...


async def test_records_that_a_rebalance_overtook_are_left_to_the_new_owner(rig, prompt, monkeypatch):
    """The poll began before the partition went to another member and ended after it: nothing of it is started here."""
    poll, other = MemoryConsumer.poll, rig.broker.consumer("workers", rig.names.all_prompts, Bystander())
    lost = TopicPartition("v4flash.prompts.standard", 1)
    overtaken = asyncio.Event()

    async def slow(self, tp, max_records, timeout_seconds):
        records = await poll(self, tp, max_records, timeout_seconds)
        if records and tp == lost and not overtaken.is_set():
            overtaken.set()
            await other.start()
        return records

    monkeypatch.setattr(MemoryConsumer, "poll", slow)
    async with rig.running(rig.app()):
        value = json.dumps(prompt()).encode()
        await rig.producer.send(lost.topic, value, headers=(("x-request-id", b"theirs"),), partition=1)
        await overtaken.wait()
        await rig.producer.send(lost.topic, value, headers=(("x-request-id", b"ours"),), partition=0)
        await rig.until_replied("ours")
    assert rig.replies("theirs") == []
    assert lost in other.assignment()
    assert await rig.uncommitted() == {lost: 1}


async def test_a_partition_that_was_empty_is_asked_again_while_others_have_records(rig, prompt, monkeypatch):
    """Else an urgent prompt would wait for the whole backlog of another class, and classes would not share."""
    monkeypatch.setattr("worker.intake.IDLE_SECONDS", 0.002)
    for i in range(400):
        await rig.producer.send("v4flash.prompts.bulk", json.dumps(prompt("[[tokens=1]]")).encode(), partition=i % 2)
    asked: list[str] = []
    poll = MemoryConsumer.poll

    async def listening(self, tp, max_records, timeout_seconds):
        records = await poll(self, tp, max_records, timeout_seconds)
        asked.append(f"{tp.topic.rsplit('.', 1)[1]} {'some' if records else 'none'}")
        return records

    monkeypatch.setattr(MemoryConsumer, "poll", listening)
    await rig.serve_all(max_inflight_per_partition=400)
    last = max(at for at, what in enumerate(asked) if what == "bulk some")
    assert asked[:last].count("urgent none") > 4


class Pauses:
    """A consumer that only remembers what is paused."""

    def __init__(self) -> None:
        self.paused: set[TopicPartition] = set()

    def pause(self, tps) -> None:
        self.paused |= set(tps)

    def resume(self, tps) -> None:
        self.paused -= set(tps)


async def test_a_pause_ends_also_for_partitions_that_went_and_come_back(rig):
    """A rebalance in the middle of a pause: the consumer would keep it for ever."""
    app, consumer, tp = rig.app(), Pauses(), TopicPartition("v4flash.prompts.bulk", 0)
    intake, assignment = app._intake, app.member.assignment
    intake._consumer = consumer
    assignment.open = {tp}
    intake._pause(frozenset({tp}))
    assert consumer.paused == {tp}
    assignment.open = set()
    intake._pause(frozenset())
    assert consumer.paused == set()
