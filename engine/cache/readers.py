"""The threads that read the SSD, each with a buffer of its own. They know neither blocks nor what a read is for."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from engine.cache.disk import aligned_buffer

_log = logging.getLogger(__name__)

HUNG_SECONDS = 2.0
"""A read that takes longer is one of a disk that hangs."""


class Read(Protocol):
    """One visit to the disk."""

    @property
    def is_unwanted(self) -> bool:
        """Whether it may be left out by the time that its turn comes."""

    def run(self, buffer: memoryview, since: float) -> None:
        """Read into the buffer and take from there what is wanted: nobody keeps the buffer. `since` is the begin."""

    def ended(self) -> None:
        """It is no longer out, however `run` went."""


class Readers:
    """Reads in the order in which they were asked for, at most `num_threads` at a time."""

    def __init__(self, num_threads: int, buffer_bytes: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buffer_bytes = buffer_bytes
        self._queue: queue.SimpleQueue[Read | None] = queue.SimpleQueue()
        self._reading: dict[int, tuple[Read, float]] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"l3-read-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_hung(self) -> bool:
        """Whether a read is out for so long that no more should be asked for."""
        now = self._clock()
        return any(now - since > HUNG_SECONDS for _, since in self.reading())

    def reading(self) -> list[tuple[Read, float]]:
        """What is out now, and since when."""
        return list(self._reading.values())

    def put(self, read: Read) -> None:
        self._queue.put(read)

    def close(self) -> None:
        """End the threads; one that hangs in the disk is left behind."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=HUNG_SECONDS)

    def _run(self, number: int) -> None:
        buffer = aligned_buffer(self._buffer_bytes)
        while (read := self._queue.get()) is not None:
            if read.is_unwanted:
                continue
            since = self._clock()
            self._reading[number] = (read, since)
            try:
                read.run(buffer, since)
            except Exception:  # a thread that ends would leave what waits for its reads open for ever
                _log.exception("a block could not be read")
            del self._reading[number]
            read.ended()
            del read  # nor is what it has filled kept until the next one comes
