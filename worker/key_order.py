"""Prompts of one key run one after another, where their route says `order: key`. A pure decision."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from worker.broker.api import Record, TopicPartition


class _Line(NamedTuple):
    """Records of one key in one partition."""

    tp: TopicPartition
    key: bytes


class KeyOrder:
    """Knows which line runs. A record without a key has no order; one without a value asks for a cancel, and must not
    wait for what it cancels."""

    def __init__(self, is_ordered: Callable[[str], bool]) -> None:
        """`is_ordered` says so of a topic; it is asked once for each."""
        self._is_ordered = is_ordered
        self._ordered: dict[str, bool] = {}
        self._running: dict[_Line, int] = {}

    def may_start(self, waiting: Iterable[Record]) -> Callable[[Record], bool]:
        """Of all that wait, in whatever state: the first of each line whose line is free, and all without order."""
        first: dict[_Line, int] = {}
        for record in waiting:
            line = self._line(record)
            if line is not None:
                first[line] = min(record.offset, first.get(line, record.offset))

        def may(record: Record) -> bool:
            line = self._line(record)
            return line is None or (line not in self._running and first[line] == record.offset)

        return may

    def started(self, record: Record) -> None:
        line = self._line(record)
        if line is not None:
            self._running[line] = record.offset

    def ended(self, record: Record) -> None:
        """It is dealt with, or will not be here."""
        line = self._line(record)
        if line is not None and self._running.get(line) == record.offset:
            del self._running[line]

    def _line(self, record: Record) -> _Line | None:
        if record.topic not in self._ordered:  # asked for all that wait, at every poll
            self._ordered[record.topic] = self._is_ordered(record.topic)
        if record.key is None or record.value is None or not self._ordered[record.topic]:
            return None
        return _Line(record.tp, record.key)
