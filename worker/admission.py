"""Which of the records that were taken may start now. A pure decision; knows neither Kafka nor jobs."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from worker.broker.api import Record, TopicPartition
from worker.key_order import KeyOrder
from worker.lease import Answered, AnsweredBook
from worker.offsets import OffsetTracker

GATHER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """A prompt that `alone_after` vanished owners had in work runs alone, and is quarantined after `quarantine_after`
    deaths of owners while it did. No lease that was found is believed to last longer than `lease_seconds`."""

    alone_after: int = 2
    quarantine_after: int = 3
    lease_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Held:
    """A record that was taken, and when (Unix ms)."""

    record: Record
    received_ms: int


class Start(NamedTuple):
    """A record that starts now; a quarantined one is not to be served but to be put aside."""

    held: Held
    alone: bool
    quarantined: bool


class Admission:
    """Holds records back while they are leased to a former owner or an earlier one of their key is not answered, and
    all others while suspects run alone.

    Suspects run one at a time, those with the fewest deaths first, so that a stop from outside meets a different
    prompt each time. For `GATHER_SECONDS` after an assignment nothing starts that would run beside suspects which
    are still to come.
    """

    def __init__(
        self,
        tracker: OffsetTracker,
        policy: AdmissionPolicy,
        answered: AnsweredBook,
        is_ordered: Callable[[str], bool] = lambda topic: False,
    ) -> None:
        """`is_ordered` says of a topic whether its prompts of one key run one after another."""
        self._tracker = tracker
        self._order = KeyOrder(is_ordered)
        self._answered = answered
        self._policy = policy
        self._held: dict[tuple[TopicPartition, int], Held] = {}
        self._elsewhere: set[Answered] = set()
        self._freed: set[Answered] = set()
        self._gather_until = 0.0

    def __repr__(self) -> str:
        return f"Admission(held={len(self._held)})"

    @property
    def num_held(self) -> int:
        return len(self._held)

    def assigned(self, now: float) -> None:
        """Partitions came to us (monotonic seconds)."""
        self._gather_until = now + GATHER_SECONDS

    def leave_alone(self, prompts: Collection[Answered]) -> None:
        """A process whose end we will hear of is answering these: they are held, lease or not."""
        self._elsewhere |= set(prompts)

    def left_behind(self) -> None:
        """That process has gone: what it has not answered may start, lease or not."""
        self._freed = {prompt for prompt in self._elsewhere if prompt not in self._answered}
        self._elsewhere.clear()

    def arrived(self, held: Held) -> None:
        """A new record, `OffsetTracker.arrived` already."""
        record = held.record
        self._held[record.tp, record.offset] = held
        told = Answered.of(record)
        if told in self._answered:
            self.answered(told)

    def forget(self, tps: Collection[TopicPartition]) -> None:
        """The partitions leave us: what is held of them will be delivered again."""
        self._held = {key: held for key, held in self._held.items() if key[0] not in tps}

    def forget_all(self) -> None:
        """Every partition begins anew."""
        self._held.clear()

    def answered(self, told: Answered) -> bool:
        """A former owner has dealt with this one; whether it was held here for that."""
        held = self._held.get((told.tp, told.offset))
        if held is None or held.record.timestamp_ms != told.timestamp_ms:
            return False
        if told not in self._elsewhere and self._tracker.lease_until_ms(told.tp, told.offset) is None:
            return False
        self._elsewhere.discard(told)
        del self._held[told.tp, told.offset]
        self._tracker.finished(told.tp, told.offset)
        return True

    def start(self, *, num_running: int, now: float, wall_ms: int) -> list[Start]:
        """What starts now; it is no longer held, and has `OffsetTracker.started` still to come."""
        in_turn = self._order.may_start(held.record for held in self._held.values())
        waiting = [held for held in self._held.values() if in_turn(held.record)]
        free = [held for held in waiting if not self._is_leased(held, wall_ms)]
        marked = {self._key(held): deaths for held in free if (deaths := self._deaths(held)) is not None}
        starts = [
            Start(held, alone=False, quarantined=True)
            for held in free
            if marked.get(self._key(held), 0) >= self._policy.quarantine_after
        ]
        expected = any(mark.vanished >= self._policy.alone_after for mark in self._tracker.expected_marks())
        gathering = expected and now < self._gather_until
        suspects = [held for held in free if 0 <= marked.get(self._key(held), -1) < self._policy.quarantine_after]
        if suspects or gathering or self._tracker.runs_alone:
            if suspects and not gathering and num_running == 0 and not starts:
                first = min(suspects, key=lambda held: (marked[self._key(held)], self._key(held)))
                starts.append(Start(first, alone=True, quarantined=False))
        else:
            starts += [Start(held, alone=False, quarantined=False) for held in free if self._key(held) not in marked]
        for chosen in starts:
            del self._held[self._key(chosen.held)]
            self._freed.discard(Answered.of(chosen.held.record))
            self._order.started(chosen.held.record)
        return starts

    def ended(self, record: Record) -> None:
        """What was started has ended: the next one of its key may start."""
        self._order.ended(record)

    @staticmethod
    def _key(held: Held) -> tuple[TopicPartition, int]:
        return held.record.tp, held.record.offset

    def _deaths(self, held: Held) -> int | None:
        """None for one that may have company."""
        mark = self._tracker.found_mark(held.record.tp, held.record.offset)
        return mark.deaths if mark.vanished >= self._policy.alone_after else None

    def _is_leased(self, held: Held, wall_ms: int) -> bool:
        prompt = Answered.of(held.record)
        if prompt in self._elsewhere or prompt in self._freed:
            return prompt in self._elsewhere
        until = self._tracker.lease_until_ms(held.record.tp, held.record.offset)
        if until is None:
            return False
        longest = held.received_ms + int(self._policy.lease_seconds * 1000)
        return wall_ms < min(until, longest)
