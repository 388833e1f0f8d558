"""Where is my prompt? The stage from what Kafka says, and the command against a worker at work."""

import asyncio
import json

import pytest

from engine.scripted import ScriptedEngine
from worker.broker.api import OffsetCommit, Record
from worker.cli.inspect import find, inspect_prompt
from worker.commit_metadata import EMPTY, CommitMetadata, Mark, MarkState
from worker.errors import SettingsError
from worker.settings import Settings
from worker.whereabouts import Stage, whereabouts

SETTINGS = Settings(group_id="workers")
PROMPT = Record("t", 0, 5, 0, None, b"{}")
BUSY = CommitMetadata(
    done=frozenset({4, 9}),
    leases={6: 1_000},
    marks={5: Mark(MarkState.TOGETHER), 7: Mark(MarkState.WAITING, 1, 2)},
)


@pytest.mark.parametrize(
    "offset, commit, metadata, stage",
    [
        (5, None, EMPTY, Stage.NOT_POLLED),
        (5, OffsetCommit(5), EMPTY, Stage.NOT_POLLED),
        (5, OffsetCommit(6), EMPTY, Stage.COMMITTED),
        (4, OffsetCommit(3), BUSY, Stage.COMMITTED),
        (5, OffsetCommit(3), BUSY, Stage.RUNNING),
        (6, OffsetCommit(3), BUSY, Stage.LEASED),
        (7, OffsetCommit(3), BUSY, Stage.LEFT),
        (8, OffsetCommit(3), BUSY, Stage.QUEUED),
        (10, OffsetCommit(3), BUSY, Stage.NOT_POLLED),
    ],
)
def test_a_stage_follows_from_the_commit(
    offset: int, commit: OffsetCommit | None, metadata: CommitMetadata, stage: Stage
) -> None:
    """The watermark, and what the metadata says above it."""
    prompt = Record("t", 0, offset, 0, None, b"{}")
    assert whereabouts(prompt, commit, metadata, [], []).stage is stage


def test_a_terminal_reply_counts_before_the_commit_does() -> None:
    """A commit may be half a second behind."""
    assert whereabouts(PROMPT, OffsetCommit(3), BUSY, [PROMPT], []).stage is Stage.ANSWERED
    assert whereabouts(PROMPT, OffsetCommit(6), EMPTY, [PROMPT], []).stage is Stage.COMMITTED


async def stages(rig) -> dict[str, Stage]:
    return {name: here.stage for name in ("slow", "good", "bad") for here in await find(rig.broker, SETTINGS, name)}


async def test_a_prompt_is_followed_from_its_topic_to_its_answer(rig, prompt, capsys):
    """Not polled, running, committed, dead-lettered; the command shows places and events, and no text."""
    key = {"key": b"one partition"}
    for name, body in {"slow": prompt("[[stall]] kumquat"), "good": prompt("kumquat"), "bad": b"kumquat"}.items():
        value = body if isinstance(body, bytes) else json.dumps(body).encode()
        await rig.producer.send(rig.names.prompts("standard"), value, headers=(("x-request-id", name.encode()),), **key)
    assert await stages(rig) == dict.fromkeys(("slow", "good", "bad"), Stage.NOT_POLLED)
    async with rig.running(rig.app(ScriptedEngine(), grace_seconds=0.1, first_token_timeout_ms=60_000)):
        await rig.until_replied("good")
        await rig.until_replied("bad")
        async with asyncio.timeout(10):
            while (await stages(rig))["good"] is not Stage.COMMITTED:  # noqa: ASYNC110  a commit wakes nobody
                await asyncio.sleep(0)
        assert await stages(rig) == {
            "slow": Stage.RUNNING,
            "good": Stage.COMMITTED,
            "bad": Stage.DEAD_LETTERED,
        }
    assert (await stages(rig))["slow"] is Stage.QUEUED
    (here,) = await find(rig.broker, SETTINGS, "bad")
    place = f"{here.prompt.topic}:{here.prompt.partition}:{here.prompt.offset}"
    assert await inspect_prompt(rig.broker, SETTINGS, place) == 0
    told = capsys.readouterr().out
    for word in (place, "dead-lettered", "InvalidMessage", "error, attempt"):
        assert word in told
    assert "kumquat" not in told
    assert await inspect_prompt(rig.broker, SETTINGS, "nobody") == 1
    with pytest.raises(SettingsError, match="no topic nothing"):
        await find(rig.broker, SETTINGS, "nothing:0:0")
