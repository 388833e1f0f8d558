"""Which offsets wait, run and are done, and what each partition may commit. Decides only; never touches Kafka."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import count

from worker.broker.api import TopicPartition
from worker.commit_metadata import Mark, MarkState
from worker.partition_state import UNMARKED, PartitionStart, PartitionState, Progress, earned, is_another_log, is_behind


class OffsetTracker:
    """The contiguous watermark per partition: it never passes an unfinished offset and never goes back.

    Offsets arrive in order and may have gaps. A partition that is taken away and given back keeps its memory, so that
    an offset that is running or done here is not started twice; what only waited is forgotten and delivered again.
    """

    def __init__(self, *, max_inflight_per_partition: int) -> None:
        self._max_window = max_inflight_per_partition
        self._partitions: dict[TopicPartition, PartitionState] = {}
        self._logs = count()

    def __repr__(self) -> str:
        parts = (
            f"{tp.topic}-{tp.partition}: watermark={part.watermark} waiting={len(part.waiting)} "
            f"running={len(part.running)} done={len(part.done)}"
            for tp, part in sorted(self._partitions.items())
        )
        return f"OffsetTracker({', '.join(parts)})"

    def assign(self, starts: Mapping[TopicPartition, PartitionStart]) -> None:
        """These partitions, and no others, are ours, and deliver from their start on."""
        for tp, start in starts.items():
            if tp not in self._partitions or is_another_log(self._partitions[tp], start):
                self._partitions[tp] = PartitionState(next(self._logs))
            self._begin(self._partitions[tp], start)
        for tp in set(self._partitions) - set(starts):
            self._take_away(self._partitions[tp])
            if not self._partitions[tp].running:
                del self._partitions[tp]

    def forget(self, tps: Collection[TopicPartition]) -> None:
        """They are other logs now: what still runs of the former ones changes nothing when it ends."""
        for tp in tps:
            self._partitions.pop(tp, None)

    def _begin(self, part: PartitionState, start: PartitionStart) -> None:
        self._take_away(part)
        part.assigned = True
        part.leases, part.found = {}, {}
        if start.offset is None:
            part.next = start.first if part.next is None else part.next  # to be committed, also if nothing ever comes
            return
        part.committed = Progress(start.offset, start.metadata)
        part.next = start.offset if part.next is None else max(start.offset, part.next)
        passed = {offset for offset in part.running if offset < start.offset}
        part.strays |= passed
        for offset in passed:
            del part.running[offset]
        part.done |= start.metadata.done
        ours = {*part.running, *part.done}
        part.leases = {at: until for at, until in start.metadata.leases.items() if at not in ours}
        for at, mark in start.metadata.marks.items():
            if at not in ours:
                died, vanished = mark.state is MarkState.ALONE, mark.state is not MarkState.WAITING
                part.found[at] = Mark(MarkState.WAITING, mark.deaths + died, mark.vanished + vanished)
        part.settle()

    def hand_over(self, tps: Collection[TopicPartition], *, leased_until_ms: int) -> dict[TopicPartition, Progress]:
        """The last progress to commit of assigned partitions that leave us; nothing is committed for them afterwards.

        What runs is leased and goes on; `is_assigned` is False for it from now on.
        """
        last = {}
        for tp in tps:
            part = self._partitions.get(tp)
            if part is not None and part.assigned:
                progress = part.progress(leased_until_ms=leased_until_ms)
                if progress is not None and progress != part.committed and not is_behind(progress, part.committed):
                    last[tp] = progress
                self._take_away(part)
        return last

    @staticmethod
    def _take_away(part: PartitionState) -> None:
        """What waits will be delivered again, so the watermark may not pass it."""
        part.next = part.watermark
        part.waiting.clear()
        part.assigned = False

    def is_assigned(self, tp: TopicPartition) -> bool:
        return tp in self._partitions and self._partitions[tp].assigned

    def arrived(self, tp: TopicPartition, offset: int) -> bool:
        """Whether `offset` is new here and has to be worked on; False for one that waits, runs or is done already."""
        part = self._part(tp)
        if offset in part.strays:
            part.strays.remove(offset)
            part.running[offset] = Mark(MarkState.TOGETHER)
        new = not part.knows(offset)
        if new:
            part.waiting.add(offset)
        if part.next is None or offset >= part.next:
            part.next = offset + 1
            part.settle()
        return new

    def passed(self, tp: TopicPartition, next_offset: int) -> None:
        """Nothing that was not delivered lies before `next_offset`: a gap, as compaction and control records leave."""
        part = self._partitions.get(tp)
        if part is not None and part.assigned and (part.next is None or next_offset > part.next):
            part.next = next_offset
            part.settle()

    def started(self, tp: TopicPartition, offset: int, *, alone: bool = False) -> int:
        """A waiting offset begins; the number is for its end. Raises KeyError for one that does not wait."""
        part = self._partitions[tp]
        part.waiting.remove(offset)
        part.leases.pop(offset, None)
        found = part.found.pop(offset, UNMARKED)
        part.running[offset] = replace(found, state=MarkState.ALONE if alone else MarkState.TOGETHER)
        return part.log

    def finished(self, tp: TopicPartition, offset: int, log: int | None = None) -> None:
        """`offset` has its terminal record acknowledged, here or elsewhere. What began in another log (`log` is from
        `started`) or was committed by another owner changes nothing. Raises KeyError for an offset not under way."""
        part = self._partitions.get(tp)
        if log is not None and (part is None or part.log != log):
            return
        if part is None:
            raise KeyError(offset)
        if offset in part.strays:
            part.strays.remove(offset)
            return
        if offset in part.waiting:
            part.waiting.remove(offset)
        else:
            del part.running[offset]
        part.done.add(offset)
        part.leases.pop(offset, None)
        part.found.pop(offset, None)
        part.settle()

    def given_up(self) -> None:
        """A graceful end: what still runs is left for redelivery, and what it had earned by deaths stays with it."""
        for part in self._partitions.values():
            if part.assigned:
                part.waiting |= part.running.keys()
                part.found |= earned(part.running)
            part.running.clear()

    def is_unfinished(self, tp: TopicPartition, offset: int) -> bool:
        """Whether it waits or runs here."""
        part = self._partitions.get(tp)
        return part is not None and (offset in part.waiting or offset in part.running)

    def lease_until_ms(self, tp: TopicPartition, offset: int) -> int | None:
        """Until when a former owner may still answer `offset`."""
        part = self._partitions.get(tp)
        return None if part is None else part.leases.get(offset)

    def found_mark(self, tp: TopicPartition, offset: int) -> Mark:
        """What vanished owners left on `offset`, which does not run here."""
        part = self._partitions.get(tp)
        return UNMARKED if part is None else part.found.get(offset, UNMARKED)

    def next_offset(self, tp: TopicPartition) -> int | None:
        """Where delivery goes on; None where the consumer's own start counts."""
        part = self._partitions.get(tp)
        return None if part is None else part.next

    def expected_marks(self) -> list[Mark]:
        """Those of offsets that have not been delivered yet. Some may never be: a gap."""
        parts = [part for part in self._partitions.values() if part.assigned]
        return [mark for part in parts for at, mark in part.found.items() if part.next is None or at >= part.next]

    def room(self, tp: TopicPartition) -> int:
        """How many more offsets may arrive before the oldest unfinished one has to end."""
        part = self._partitions.get(tp)
        if part is None:
            return self._max_window
        arrived = sum(1 for offset in part.done if part.next is not None and offset < part.next)
        return max(0, self._max_window - len(part.waiting) - len(part.running) - arrived)

    def watermark(self, tp: TopicPartition) -> int | None:
        """The next offset to commit; None while nothing has come."""
        part = self._partitions.get(tp)
        return None if part is None else part.watermark

    def to_commit(self) -> dict[TopicPartition, Progress]:
        """Assigned partitions about which the broker does not know everything."""
        news = {}
        for tp, part in self._partitions.items():
            progress = part.progress() if part.assigned else None
            if progress is not None and progress != part.committed and not is_behind(progress, part.committed):
                news[tp] = progress
        return news

    def committed(self, progress: Mapping[TopicPartition, Progress]) -> None:
        """The broker has these. What lies beyond all that came is of a log that was forgotten meanwhile."""
        for tp, made in progress.items():
            part = self._partitions.get(tp)
            if part is None or part.next is None or made.offset > part.next:
                continue
            if not is_behind(made, part.committed):
                part.committed = made

    def _part(self, tp: TopicPartition) -> PartitionState:
        if tp not in self._partitions:
            self._partitions[tp] = PartitionState(next(self._logs))
        return self._partitions[tp]

    @property
    def num_running(self) -> int:
        return sum(len(part.running) for part in self._partitions.values())

    @property
    def runs_alone(self) -> bool:
        """Whether what runs here is a marked prompt that must have no company."""
        marks = (mark for part in self._partitions.values() for mark in part.running.values())
        return any(mark.state is MarkState.ALONE for mark in marks)

    def check(self) -> None:
        """Assert the invariants: an offset has one state, and nothing below the watermark is remembered."""
        for part in self._partitions.values():
            states = (part.waiting, set(part.running), part.done, part.strays)
            assert sum(map(len, states)) == len(set().union(*states)), part
            assert part.next is None or all(at >= (part.watermark or 0) for at in part.done), part
            assert part.assigned or not part.waiting, part
            assert not part.waiting or part.next is not None, part
