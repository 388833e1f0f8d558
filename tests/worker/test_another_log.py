"""Topics that were deleted and made anew under the same name: their offsets begin again, and no prompt is lost."""

import json
from functools import partial

import pytest

from worker.broker.api import BrokerUnavailableError, OffsetCommit, Record, TopicPartition
from worker.broker.memory_cluster import PartitionLog, Topic
from worker.watchdog import Watchdog

TP = TopicPartition("v4flash.prompts.standard", 0)


async def send(rig, prompt, *ids: str) -> None:
    for request_id in ids:
        value = json.dumps(prompt(request_id)).encode()
        await rig.producer.send(TP.topic, value, headers=(("x-request-id", request_id.encode()),), partition=0)


def made_anew(rig, prompt, app, *ids: str) -> None:
    """The log is replaced under the consumer, which goes to its beginning as Kafka's does."""
    log, cluster = PartitionLog(), rig.broker._cluster
    for offset, request_id in enumerate(ids):
        value = json.dumps(prompt(request_id)).encode()
        headers = (("x-request-id", request_id.encode()),)
        log.append(Record(*TP, offset, cluster.now_ms(), None, value, headers))
    cluster.topics[TP.topic] = Topic((log, PartitionLog()), {})
    app.member.subscription._inner._positions[TP] = 0
    cluster.changes.notify()


async def test_a_commit_behind_the_end_is_of_another_log(rig, prompt):
    """Nobody ran when the topic was made anew: prompts below the commit are answered, and the commit begins again."""
    rig.broker._cluster.group("workers").offsets[TP] = OffsetCommit(50)
    async with rig.running(rig.app()):
        await send(rig, prompt, "a", "b")
        await rig.until_replied("b")
    assert rig.answer("a")
    assert await rig.uncommitted() == {}
    assert rig.broker._cluster.group("workers").offsets[TP].offset == 2


async def test_what_was_there_before_the_worker_is_answered_below_a_commit_behind_the_end(rig, prompt):
    """As for a group without a commit: what is not older than the replay age."""
    await send(rig, prompt, "a", "b")
    rig.broker._cluster.group("workers").offsets[TP] = OffsetCommit(50)
    await rig.serve_all()
    assert rig.answer("a")
    assert rig.answer("b")
    assert await rig.uncommitted() == {}


@pytest.mark.parametrize("num_prompts", [1, 3, 9])
async def test_a_log_that_was_made_anew_under_a_worker_is_read_from_its_beginning(rig, prompt, num_prompts):
    """Whether it is shorter by then than the former one or longer; what runs of that one counts for nothing."""
    app = rig.app()
    async with rig.running(app):
        await send(rig, prompt, "old0", "old1", "old2")
        await rig.until_replied("old2")
        await send(rig, prompt, "[[slow]] [[tokens=12]]")
        ids = [f"new{i}" for i in range(num_prompts)]
        made_anew(rig, prompt, app, *ids)
        for request_id in ids:
            await rig.until_replied(request_id)
    assert all(rig.answer(request_id) for request_id in ids)
    assert await rig.uncommitted() == {}
    assert rig.broker._cluster.group("workers").offsets[TP].offset == num_prompts


async def test_a_broker_that_is_away_meanwhile_only_delays_a_new_log(rig, prompt, monkeypatch):
    """The worker does not end; it joins again, and knows still that the commits are of the former log."""
    monkeypatch.setattr("worker.membership.Watchdog", partial(Watchdog, stall_seconds=0.2))
    app = rig.app()
    async with rig.running(app):
        await send(rig, prompt, "old0", "old1")
        await rig.until_replied("old1")
        rig.broker.fail_next("committed", BrokerUnavailableError("away"))
        ids = [f"new{i}" for i in range(5)]
        made_anew(rig, prompt, app, *ids)
        await rig.until_replied("new4")
    assert all(rig.answer(request_id) for request_id in ids)
    assert await rig.uncommitted() == {}
