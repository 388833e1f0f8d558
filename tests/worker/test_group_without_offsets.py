"""Where a worker begins when nothing was committed, and what offsets that no record has do to it."""

import json

import pytest

from worker.broker.api import OffsetCommit, TopicPartition
from worker.commit_metadata import CommitMetadata, Mark, MarkState, MetadataCodec

HOUR_MS = 3_600_000
TP = TopicPartition("v4flash.prompts.standard", 0)


async def send_aged(rig, prompt, request_id: str, hours: float, partition: int = 0) -> None:
    """A prompt that was appended so long ago."""
    now_ms = rig.broker._cluster.now_ms
    rig.broker._cluster.now_ms = lambda: now_ms() - int(hours * HOUR_MS)
    value, headers = json.dumps(prompt(request_id)).encode(), (("x-request-id", request_id.encode()),)
    await rig.producer.send(TP.topic, value, headers=headers, partition=partition)
    rig.broker._cluster.now_ms = now_ms


def compact_away(rig, *offsets: int) -> None:
    log = rig.broker._cluster.log(TP)
    log.records = [record for record in log.records if record.offset not in offsets]


def commit(rig, offset: int, metadata: CommitMetadata) -> None:
    codec = MetadataCodec()
    codec.bind("memory")
    rig.broker._cluster.group("workers").offsets[TP] = OffsetCommit(offset, codec.encode(TP, offset, metadata))


async def test_a_group_without_offsets_leaves_what_is_too_old(rig, prompt):
    """Offsets expire while nothing runs: what was answered a week ago is not answered again."""
    await send_aged(rig, prompt, "old", 30)
    await send_aged(rig, prompt, "young", 20)
    await rig.serve_all()
    assert rig.replies("old") == []
    assert rig.answer("young")


async def test_a_new_group_takes_everything_when_it_is_told_to(rig, prompt):
    """`--from-beginning`."""
    await send_aged(rig, prompt, "old", 30)
    await rig.serve_all(from_beginning=True)
    assert rig.answer("old")


async def test_a_group_with_offsets_is_no_new_group(rig, prompt):
    """Told to begin with the oldest prompt, it does not where only some offsets are gone."""
    await send_aged(rig, prompt, "old", 30, partition=1)
    await send_aged(rig, prompt, "young", 20, partition=1)
    commit(rig, 0, CommitMetadata())
    await rig.serve_all(from_beginning=True)
    assert rig.replies("old") == []
    assert rig.answer("young")


async def test_a_prompt_that_waited_longer_than_that_for_any_worker_is_answered(rig, prompt):
    """Its partition was empty while a worker had it, and then nobody ran for days: that is no reason to lose it."""
    await send_aged(rig, prompt, "first", 100, partition=1)
    await rig.serve_all(max_replay_age_seconds=200 * 3600.0)
    await send_aged(rig, prompt, "second", 30, partition=0)
    await rig.serve_all()
    assert rig.answer("second")
    assert await rig.uncommitted() == {}


async def test_every_partition_has_a_committed_offset_as_soon_as_it_has_an_owner(rig):
    """Also those without a prompt; after a start that found them so."""
    await rig.serve_all()
    offsets = rig.broker._cluster.group("workers").offsets
    assert offsets == {
        TopicPartition(topic, partition): OffsetCommit(0) for topic in rig.names.all_prompts for partition in (0, 1)
    }


@pytest.mark.parametrize("gone", [(0,), (1, 2), (3, 4), (5,), (0, 2, 4), (0, 1, 2, 3, 4, 5)])
async def test_offsets_that_compaction_took_hold_nothing_up(rig, prompt, gone, monkeypatch):
    """In front, between and at the end; whatever else is there is answered, and the commit passes them all."""
    ids = [f"r{at}" for at in range(6)]
    for request_id in ids:
        await send_aged(rig, prompt, request_id, 0)
    monkeypatch.setattr("worker.intake.GAP_SECONDS", 0.05)
    compact_away(rig, *gone)
    await rig.serve_all()
    assert [len(rig.replies(request_id)) for request_id in ids] == [int(at not in gone) for at in range(6)]
    assert await rig.uncommitted() == {}


async def test_what_a_vanished_owner_left_on_an_offset_that_is_gone_holds_nothing_up(rig, prompt):
    """A mark that asks for a run alone, a lease and a done offset, and compaction took all three."""
    ids = [f"r{at}" for at in range(6)]
    for request_id in ids:
        await send_aged(rig, prompt, request_id, 0)
    marks, leases = {1: Mark(MarkState.TOGETHER, 0, 5)}, {2: 1 << 42}
    commit(rig, 1, CommitMetadata(frozenset({3}), leases, marks))
    compact_away(rig, 1, 2, 3)
    await rig.serve_all()
    assert [len(rig.replies(request_id)) for request_id in ids] == [0, 0, 0, 0, 1, 1]
    assert await rig.uncommitted() == {}
