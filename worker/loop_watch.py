"""A thread that sees when the event loop stands still, which nothing on the loop could tell."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

STALL_SECONDS = 30.0
LOOKS_PER_STALL = 10


class LoopWatch:
    """Runs within `with`; `tell` is called on the thread, once for each time without a `beat` for so long."""

    def __init__(self, tell: Callable[[], object], *, stall_seconds: float = STALL_SECONDS) -> None:
        self._tell = tell
        self._stall_seconds = stall_seconds
        self._last = time.monotonic()
        self._told = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop watch", daemon=True)

    def beat(self) -> None:
        """The loop runs."""
        self._last, self._told = time.monotonic(), False

    def __enter__(self) -> Self:
        self.beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._stall_seconds / LOOKS_PER_STALL):
            if not self._told and time.monotonic() - self._last >= self._stall_seconds:
                self._told = True
                self._tell()
