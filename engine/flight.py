"""The last things that happened, kept in memory for whoever asks why. Never text, never token ids."""

from collections import deque
from typing import Any

MAX_EVENTS = 2000
MAX_NAMED = 16

Event = dict[str, Any]


class FlightRecorder:
    """The youngest `max_events`. Any thread may record; the cost is that of a dictionary."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=max_events)

    def __repr__(self) -> str:
        return f"FlightRecorder(events={len(self._events)})"

    def record(self, kind: str, now: float, **facts: str | int | float | list[str] | None) -> Event:
        """`now` is monotonic seconds. A fact that is not known yet is given as None, and set in what is returned."""
        event: Event = {"at": now, "kind": kind, **facts}
        self._events.append(event)
        return event

    def events(self) -> list[Event]:
        """Oldest first; a copy."""
        return [dict(event) for event in list(self._events)]
