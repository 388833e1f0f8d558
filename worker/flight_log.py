"""Writes the flight recorder to a file when a worker hangs or crashes, or when somebody asks for it (SIGQUIT)."""

import json
import os
import tempfile
import time
from itertools import count
from pathlib import Path

import structlog

from engine.api import EngineStats
from engine.flight import FlightRecorder

HANG_SECONDS = 30.0

log = structlog.get_logger(__name__)


class FlightLog:
    """One JSON object a line: first why and when, then the events, oldest first. Only its owner may read the file."""

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
                for event in (head, *self._flight.events()):
                    out.write(json.dumps(event) + "\n")
        except OSError as error:
            log.warning("the flight recorder could not be written", path=str(path), error=error.strerror)
            return None
        log.warning("flight recorder written", path=str(path), reason=reason)
        return path


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
