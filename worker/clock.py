"""Time as the worker sees it: one monotonic clock, and a wall clock that is read once and advanced by it."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds."""

    def wall_ms(self) -> int:
        """Unix time in milliseconds; never jumps when the host's clock is set."""


class SystemClock:
    """The host's clocks."""

    def __init__(self) -> None:
        self._wall_at_zero = time.time() - time.monotonic()

    def now(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return int((self._wall_at_zero + time.monotonic()) * 1000)
