"""The file operations of the SSD tier, with `O_DIRECT` where the filesystem has it. A test hands in its own."""

import fcntl
import logging
import mmap
import os
from pathlib import Path

_log = logging.getLogger(__name__)

ALIGNMENT = 4096
"""`O_DIRECT` wants address, offset and length in multiples of it (the logical block of a disk is this or a part)."""


def padded(num_bytes: int) -> int:
    """`num_bytes` rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Disk:
    """Blocking calls; they raise OSError. Files are readable and writable by their owner alone."""

    def __init__(self) -> None:
        self.direct: dict[Path, bool] = {}

    def prepare(self, directory: Path) -> None:
        """Make the directory, and find out (saying so once) whether its filesystem bypasses the page cache."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = directory / f"direct-{os.getpid()}"
        probe.unlink(missing_ok=True)
        self.direct[directory] = True
        try:
            os.close(self.open(probe, create=True))
        except OSError as error:
            self.direct[directory] = False
            os.close(self.open(probe, create=True))
            _log.warning("%s: no O_DIRECT (%s): reads go through the page cache", directory, error.strerror)
        probe.unlink()

    def lock(self, directory: Path) -> int:
        """Hold the directory for this process until the descriptor is closed. Raises BlockingIOError if it is held."""
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd

    def unlock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def files(self, directory: Path, suffix: str) -> list[Path]:
        """The files of a directory that end so, by name."""
        return sorted(directory.glob(f"*{suffix}"))

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def close(self, fd: int) -> None:
        os.close(fd)

    def open(self, path: Path, *, create: bool = False) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        if self.direct.get(path.parent, False):
            flags |= getattr(os, "O_DIRECT", 0)
        return os.open(path, flags, 0o600)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Take the space now, so that a full disk shows here and the file lies in one piece."""
        os.posix_fallocate(fd, 0, num_bytes)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Fill the buffer; returns the bytes read, fewer only at the end of the file."""
        return os.preadv(fd, [buffer], offset)

    def write(self, fd: int, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            done += os.pwrite(fd, buffer[done:], offset + done)

    def truncate(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def free_bytes(self, directory: Path) -> int:
        stats = os.statvfs(directory)
        return stats.f_bavail * stats.f_frsize


def aligned_buffer(num_bytes: int) -> memoryview:
    """Zeroed memory at an aligned address."""
    return memoryview(mmap.mmap(-1, padded(num_bytes)))
