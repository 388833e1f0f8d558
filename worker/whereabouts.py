"""Where a prompt is, from what Kafka alone says: its record, the group's commit, the replies and the dead letters."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from worker.broker.api import OffsetCommit, Record
from worker.commit_metadata import CommitMetadata, MarkState
from worker.letter import Letter


class Stage(StrEnum):
    """NOT_POLLED: no worker has shown that it got so far. QUEUED: a later prompt of its partition began or ended
    already. LEFT: a worker vanished with it; it will be started again. LEASED: a former owner of the partition still
    answers it. ANSWERED: its terminal reply is there, the commit is not."""

    NOT_POLLED = "not polled"
    QUEUED = "queued"
    RUNNING = "running"
    LEFT = "left behind by a worker that vanished"
    LEASED = "running with the partition's former owner"
    ANSWERED = "answered"
    COMMITTED = "answered and committed"
    DEAD_LETTERED = "dead-lettered"


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """One prompt; `commit` is that of its partition, None where the group never committed."""

    prompt: Record
    stage: Stage
    commit: OffsetCommit | None
    replies: tuple[Record, ...] = ()
    letters: tuple[Letter, ...] = ()


def whereabouts(
    prompt: Record,
    commit: OffsetCommit | None,
    metadata: CommitMetadata,
    replies: Sequence[Record],
    letters: Sequence[Letter],
) -> Whereabouts:
    """`metadata` is the commit's; `replies` are terminal ones with the prompt's id; `letters` are of its place."""
    stage = _stage(prompt.offset, commit, metadata, answered=bool(replies))
    return Whereabouts(prompt, Stage.DEAD_LETTERED if letters else stage, commit, tuple(replies), tuple(letters))


def _stage(offset: int, commit: OffsetCommit | None, metadata: CommitMetadata, *, answered: bool) -> Stage:
    if commit is not None and (offset < commit.offset or offset in metadata.done):
        return Stage.COMMITTED
    if answered:
        return Stage.ANSWERED
    if offset in metadata.leases:
        return Stage.LEASED
    if offset in metadata.marks:
        return Stage.LEFT if metadata.marks[offset].state is MarkState.WAITING else Stage.RUNNING
    later = max((*metadata.done, *metadata.leases, *metadata.marks), default=-1)
    return Stage.QUEUED if offset < later else Stage.NOT_POLLED
