"""A disk that is slower than it is: all reads and writes together pass at a fixed rate."""

import threading
import time

from engine.cache.disk import Disk


class SlowDisk(Disk):
    """Slow while `is_slow`."""

    def __init__(self, bytes_per_second: float, *, is_slow: bool = True) -> None:
        super().__init__()
        self.is_slow = is_slow
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._pass(len(buffer))
        return super().read(fd, buffer, offset)

    def write(self, fd: int, buffer: memoryview, offset: int) -> None:
        self._pass(len(buffer))
        super().write(fd, buffer, offset)

    def _pass(self, num_bytes: int) -> None:
        """Wait for one's turn, and then for one's bytes."""
        if not self.is_slow:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + num_bytes / self._rate
            wait = self._free_at - now
        time.sleep(wait)
