"""A disk in memory that fails on request, and blocks to write to it."""

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cache.disk import Disk, aligned_buffer
from engine.cache.record import HEADER_BYTES, RecordHeader, body_checksum, record_bytes

PAYLOAD_BYTES = 64


class MemoryDisk(Disk):
    """Files are bytearrays; `on_read` and `on_write` see every call and may raise, wait or change the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[Path, bytearray] = {}
        self.descriptors: dict[int, Path] = {}
        self.open_files: dict[int, bytearray] = {}
        self.locked: set[Path] = set()
        self.on_read: Callable[[memoryview], None] = lambda data: None
        self.on_write: Callable[[memoryview], None] = lambda data: None
        self.free = 1 << 40
        self._next = 1000

    def prepare(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)

    def lock(self, directory: Path) -> int:
        if directory in self.locked:
            raise BlockingIOError(errno.EWOULDBLOCK, "held")
        self.locked.add(directory)
        return self._descriptor(directory)

    def unlock(self, fd: int) -> None:
        self.locked.discard(self.descriptors.pop(fd))

    def files(self, directory: Path, suffix: str) -> list[Path]:
        return sorted(path for path in self.contents if path.parent == directory and path.suffix == suffix)

    def size(self, fd: int) -> int:
        return len(self.open_files[fd])

    def close(self, fd: int) -> None:
        del self.open_files[fd]
        del self.descriptors[fd]

    def open(self, path: Path, *, create: bool = False) -> int:
        if create:
            self.contents[path] = bytearray()
        fd = self._descriptor(path)
        self.open_files[fd] = self.contents[path]
        return fd

    def allocate(self, fd: int, num_bytes: int) -> None:
        if num_bytes > self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.free -= num_bytes
        self.open_files[fd].extend(bytes(num_bytes))

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        data = self.open_files[fd][offset : offset + len(buffer)]
        buffer[: len(data)] = data
        self.on_read(buffer)
        return len(data)

    def write(self, fd: int, buffer: memoryview, offset: int) -> None:
        self.on_write(buffer)
        file = self.open_files[fd]
        if len(file) < offset + len(buffer):
            file.extend(bytes(offset + len(buffer) - len(file)))
        file[offset : offset + len(buffer)] = buffer

    def truncate(self, fd: int, num_bytes: int) -> None:
        del self.open_files[fd][num_bytes:]

    def remove(self, path: Path) -> None:
        content = self.contents.pop(path, None)
        self.free += 0 if content is None else len(content)

    def free_bytes(self, directory: Path) -> int:
        return self.free

    def _descriptor(self, path: Path) -> int:
        self._next += 1
        self.descriptors[self._next] = path
        return self._next


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


def named(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def make_record(name: object, depth: int = 0) -> tuple[RecordHeader, memoryview]:
    """A header and its whole record; the payload is the name's hash, twice."""
    payload = memoryview(named(name) * 2)
    record = aligned_buffer(record_bytes(len(payload)))
    record[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    header = RecordHeader(named(name), depth, len(payload), len(payload), body_checksum(record[HEADER_BYTES:]))
    header.pack_into(record)
    return header, record


@pytest.fixture
def record() -> Callable[..., tuple[RecordHeader, memoryview]]:
    return make_record
