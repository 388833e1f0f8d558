"""Which offsets are running, and how far each partition may be committed. Decides only; never touches Kafka."""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from worker.broker.api import TopicPartition


@dataclass(slots=True)
class _Partition:
    next_offset: int | None = None
    committed: int | None = None
    window: deque[int] = field(default_factory=deque)
    running: set[int] = field(default_factory=set)
    assigned: bool = True

    @property
    def watermark(self) -> int | None:
        return self.window[0] if self.window else self.next_offset

    def advance(self) -> None:
        while self.window and self.window[0] not in self.running:
            self.window.popleft()


class OffsetTracker:
    """The contiguous watermark per partition: it never passes an unfinished offset and never goes back.

    Offsets are started in order and may have gaps. A partition that is taken away and given back keeps its memory, so
    that an offset that is running or done here is not started twice.
    """

    def __init__(self, *, max_inflight_per_partition: int) -> None:
        self._max_window = max_inflight_per_partition
        self._partitions: dict[TopicPartition, _Partition] = {}

    def __repr__(self) -> str:
        parts = (
            f"{tp.topic}-{tp.partition}: watermark={part.watermark} running={len(part.running)}"
            for tp, part in sorted(self._partitions.items())
        )
        return f"OffsetTracker({', '.join(parts)})"

    def assign(self, committed: Mapping[TopicPartition, int | None]) -> None:
        """These partitions, and no others, are ours; the values are their committed offsets."""
        for tp, offset in committed.items():
            part = self._partitions.setdefault(tp, _Partition())
            part.assigned = True
            if offset is None:
                continue
            part.committed = offset if part.committed is None else max(part.committed, offset)
            if part.next_offset is not None and offset > part.next_offset:
                part.next_offset = offset
        for tp in set(self._partitions) - set(committed):
            self._forget_or_keep(tp)

    def revoke(self, tps: Collection[TopicPartition]) -> None:
        """No more commits for these; what runs goes on and is remembered until the next `assign`."""
        for tp in tps:
            if tp in self._partitions:
                self._partitions[tp].assigned = False

    def started(self, tp: TopicPartition, offset: int) -> bool:
        """Whether `offset` is new here and has to be worked on; False for one that is running or done already."""
        part = self._partitions.setdefault(tp, _Partition())
        if part.next_offset is not None and offset < part.next_offset:
            return False
        part.next_offset = offset + 1
        part.window.append(offset)
        part.running.add(offset)
        return True

    def finished(self, tp: TopicPartition, offset: int) -> None:
        """`offset` has its terminal record acknowledged. Raises KeyError for one that was not running."""
        part = self._partitions[tp]
        part.running.remove(offset)
        part.advance()

    def room(self, tp: TopicPartition) -> int:
        """How many more offsets may start before the oldest unfinished one has to end."""
        part = self._partitions.get(tp)
        return self._max_window if part is None else max(0, self._max_window - len(part.window))

    def watermark(self, tp: TopicPartition) -> int | None:
        """The next offset to commit; None while nothing has started."""
        part = self._partitions.get(tp)
        return None if part is None else part.watermark

    def to_commit(self) -> dict[TopicPartition, int]:
        """Assigned partitions whose watermark is beyond what is committed."""
        return {
            tp: part.watermark
            for tp, part in self._partitions.items()
            if part.assigned
            and part.watermark is not None
            and (part.committed is None or part.watermark > part.committed)
        }

    def committed(self, offsets: Mapping[TopicPartition, int]) -> None:
        """The broker has these."""
        for tp, offset in offsets.items():
            part = self._partitions.get(tp)
            if part is not None:
                part.committed = offset if part.committed is None else max(part.committed, offset)

    @property
    def num_running(self) -> int:
        return sum(len(part.running) for part in self._partitions.values())

    def check(self) -> None:
        """Assert the invariants: the window is ordered, holds all that runs, and begins with a running offset."""
        for part in self._partitions.values():
            assert part.running <= set(part.window)
            assert list(part.window) == sorted(part.window)
            assert not part.window or part.window[0] in part.running

    def _forget_or_keep(self, tp: TopicPartition) -> None:
        part = self._partitions[tp]
        part.assigned = False
        if not part.running:
            del self._partitions[tp]
