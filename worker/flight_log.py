"""Writes the flight recorder to a file when a worker hangs or crashes, or when somebody asks for it (SIGQUIT)."""

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType

import structlog

from engine.api import EngineStats
from engine.flight import FlightRecorder

HANG_SECONDS = 30.0

log = structlog.get_logger(__name__)


class FlightLog:
    """One JSON object a line: why and when, where each thread is, then the events, oldest first. Only its owner may
    read the file. May be written from any thread."""

    def __init__(self, flight: FlightRecorder, folder: Path | None = None) -> None:
        self._flight = flight
        self._folder = folder or Path(tempfile.gettempdir())
        self._numbers = count(1)

    def write(self, reason: str) -> Path | None:
        """The file, or None where none can be written: whatever is wrong already must not become worse."""
        path = self._folder / f"v4flash-flight-{os.getpid()}-{next(self._numbers)}.jsonl"
        head = {"kind": "flight", "reason": reason, "at": time.monotonic(), "unix_seconds": time.time()}
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as out:
                for event in (head, *_stacks(), *self._flight.events()):
                    out.write(json.dumps(event) + "\n")
        except OSError as error:
            log.warning("the flight recorder could not be written", path=str(path), error=error.strerror)
            return None
        log.warning("flight recorder written", path=str(path), reason=reason)
        return path


def _stacks() -> Iterator[dict[str, object]]:
    """Where each thread of the process is: files, lines and functions, and no values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in sys._current_frames().items():
        places = [f"{place.filename}:{place.lineno} {place.name}" for place in traceback.extract_stack(frame)]
        yield {"kind": "thread", "name": names.get(number, "?"), "stack": places}


@contextmanager
def written_on_sigquit(flight: FlightLog) -> Iterator[None]:
    """SIGQUIT writes the file, and the process goes on. Works from the main thread, also while the event loop stands;
    a thread writes, since the signal may come while the log is being written to."""

    def write(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=flight.write, args=("SIGQUIT",), name="flight log").start()

    before = signal.signal(signal.SIGQUIT, write)
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, before)


class HangWatch:
    """Sees that the engine stands: requests run, and no step ends for `hang_seconds`."""

    def __init__(self, *, hang_seconds: float = HANG_SECONDS) -> None:
        self._hang_seconds = hang_seconds
        self._moved: tuple[int, float] | None = None
        self._told = False

    def hangs(self, stats: EngineStats, now: float) -> bool:
        """True once for each hang; `now` is monotonic seconds."""
        if not stats.num_running or self._moved is None or stats.steps_total != self._moved[0]:
            self._moved, self._told = (stats.steps_total, now), False
            return False
        if self._told or now - self._moved[1] < self._hang_seconds:
            return False
        self._told = True
        return True
