"""One partition as the offset tracker sees it: which offsets wait, run and are done, and what follows from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from worker.commit_metadata import EMPTY, CommitMetadata, Mark, MarkState

UNMARKED = Mark(MarkState.WAITING)


class PartitionStart(NamedTuple):
    """Where a partition begins when it comes to us; `offset` None: nothing was ever committed, and delivery begins at
    `first`. `end` is its end now."""

    offset: int | None
    metadata: CommitMetadata = EMPTY
    end: int | None = None
    first: int | None = None


class Progress(NamedTuple):
    """What may be committed: the watermark, and what is known above it."""

    offset: int
    metadata: CommitMetadata


@dataclass(slots=True)
class PartitionState:
    """What is known of one partition.

    `next` is one past the last record that came since the assignment; unfinished offsets above it came before.
    `strays` run here although another owner has committed past them: their end changes nothing. `found` are the marks
    that vanished owners left. `log` tells this log from another one that had the same name.
    """

    log: int
    next: int | None = None
    committed: Progress | None = None
    waiting: set[int] = field(default_factory=set)
    running: dict[int, Mark] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    strays: set[int] = field(default_factory=set)
    leases: dict[int, int] = field(default_factory=dict)
    found: dict[int, Mark] = field(default_factory=dict)
    assigned: bool = True

    @property
    def watermark(self) -> int | None:
        return None if self.next is None else min((self.next, *self.running, *self.waiting))

    def knows(self, offset: int) -> bool:
        watermark = self.watermark
        if watermark is not None and offset < watermark:
            return True
        return offset in self.running or offset in self.done or offset in self.waiting

    def settle(self) -> None:
        """Forget what lies below the watermark."""
        watermark = self.watermark
        assert watermark is not None
        if self.done:
            self.done = {offset for offset in self.done if offset >= watermark}
        for table in (self.leases, self.found):
            for offset in [offset for offset in table if offset < watermark]:
                del table[offset]

    def progress(self, *, leased_until_ms: int | None = None) -> Progress | None:
        """With `leased_until_ms` the partition is handed over: what runs is leased instead of marked."""
        watermark = self.watermark
        if watermark is None:
            return None
        leases = {at: until for at, until in self.leases.items() if at not in self.running}
        marks = dict(self.found)
        if leased_until_ms is None:
            marks |= self.running
        else:
            leases |= dict.fromkeys(self.running, leased_until_ms)
            marks |= earned(self.running)
        return Progress(watermark, CommitMetadata(frozenset(self.done), leases, marks))


def earned(running: Mapping[int, Mark]) -> dict[int, Mark]:
    """A graceful end adds nothing to what vanished owners left, and takes nothing away."""
    return {at: replace(mark, state=MarkState.WAITING) for at, mark in running.items() if mark.vanished}


def is_behind(progress: Progress, committed: Progress | None) -> bool:
    return committed is not None and progress.offset < committed.offset


def is_another_log(part: PartitionState, start: PartitionStart) -> bool:
    """Whether the partition was made anew under the same name: its offsets then mean other records."""
    if part.next is None:
        return False
    forgotten = start.offset is None and part.committed is not None
    return forgotten or (start.end is not None and start.end < part.next)
