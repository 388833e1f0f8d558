"""Append-only files of one directory. Knows places and space; what is worth keeping is decided elsewhere."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine.cache.block import BlockHash
from engine.cache.disk import Disk, aligned_buffer
from engine.cache.record import HEADER_BYTES, RecordHeader, body_checksum, record_bytes, unpack_header
from engine.errors import BlockCorruptError, CacheStoreBusyError, CacheStoreError, CacheStoreFullError

_log = logging.getLogger(__name__)

SUFFIX = ".seg"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies."""

    segment: int
    offset: int
    num_bytes: int


@dataclass(slots=True)
class _Segment:
    number: int
    path: Path
    fd: int
    file_bytes: int
    used_bytes: int = 0
    num_users: int = 0
    removed: bool = False


@dataclass(slots=True)
class SegmentStore:
    """`append`, `kill` and `remove` belong to one thread; `read` to any number beside it. Never larger than
    `capacity_bytes`. A directory belongs to one process."""

    directory: Path
    capacity_bytes: int
    segment_bytes: int
    disk: Disk = field(default_factory=Disk)
    _segments: dict[int, _Segment] = field(default_factory=dict)
    _active: _Segment | None = None
    _lock_fd: int = -1
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> list[tuple[RecordHeader, Place]]:
        """Take the directory and find what an earlier process left, oldest first; what it was writing is cut off.

        Raises CacheStoreError where the directory cannot be used, CacheStoreBusyError while another process has it."""
        try:
            self.disk.prepare(self.directory)
            self._lock_fd = self.disk.lock(self.directory)
        except BlockingIOError:
            raise CacheStoreBusyError(f"l3_cache_path {self.directory} is in use by another process") from None
        except OSError as error:
            raise CacheStoreError(f"l3_cache_path {self.directory} cannot be used: {error.strerror}") from None
        try:
            found = [record for path in self._files() for record in self._reopen(path)]
            self._check_room()
        except OSError as error:
            self.close()
            raise CacheStoreError(f"l3_cache_path {self.directory} cannot be used: {error.strerror}") from None
        except BaseException:  # whatever it was, the directory does not stay locked
            self.close()
            raise
        return found

    @property
    def file_bytes(self) -> int:
        return sum(segment.file_bytes for segment in list(self._segments.values()))  # others ask while it changes

    @property
    def sealed(self) -> list[int]:
        """Segments that take no more records."""
        return [number for number in list(self._segments) if self._active is None or number != self._active.number]

    def used_bytes(self, number: int) -> int:
        return self._segments[number].used_bytes

    def append(self, record: memoryview) -> Place:
        """Write a whole record, header included, at the end. Raises CacheStoreFullError when a segment has to go first,
        OSError for what the disk says."""
        active = self._active
        if active is None or active.used_bytes + len(record) > active.file_bytes:
            active = self._start_segment(len(record))
        place = Place(active.number, active.used_bytes, len(record))
        with self._in_use(active.number):  # a `close` leaves the file to this write
            self.disk.write(active.fd, record, place.offset)
        active.used_bytes += len(record)
        return place

    def read(self, place: Place, block_hash: BlockHash, buffer: memoryview) -> tuple[RecordHeader, memoryview]:
        """The header and the payload as it is stored, in `buffer`. Raises BlockCorruptError, and OSError or KeyError
        for what is no longer there."""
        with self._in_use(place.segment) as segment:
            record = buffer[: place.num_bytes]
            if self.disk.read(segment.fd, record, place.offset) != len(record):
                raise BlockCorruptError(f"{segment.path.name} ends before {place.offset + place.num_bytes}")
        header = unpack_header(record)
        if header is None or header.dead or header.block_hash != block_hash or header.num_bytes != place.num_bytes:
            raise BlockCorruptError(f"{segment.path.name} has no such block at {place.offset}")
        if body_checksum(record[HEADER_BYTES:]) != header.body_checksum:
            raise BlockCorruptError(f"{segment.path.name} has a damaged block at {place.offset}")
        return header, record[HEADER_BYTES : HEADER_BYTES + header.stored_bytes]

    def read_pages(self, place: Place, first: int, pages: memoryview) -> None:
        """Fill `pages` with the record's from byte `first` on (both whole pages of the alignment), unchecked. Raises
        OSError and KeyError for what is no longer there."""
        with self._in_use(place.segment) as segment:
            if self.disk.read(segment.fd, pages, place.offset + first) != len(pages):
                raise OSError(f"{segment.path.name} ends before {place.offset + first + len(pages)}")

    def kill(self, place: Place, header: RecordHeader) -> None:
        """Mark a record so that no later scan finds it."""
        page = aligned_buffer(HEADER_BYTES)
        header.pack_into(page)
        with self._in_use(place.segment) as segment:
            self.disk.write(segment.fd, page, place.offset)

    def remove(self, number: int) -> None:
        """Give a sealed segment's space back; reads under way end as they would have."""
        with self._mutex:
            segment = self._segments.pop(number)
            segment.removed = True
            idle = segment.num_users == 0
        self.disk.remove(segment.path)
        if idle:
            self.disk.close(segment.fd)

    def close(self) -> None:
        """Give the directory back. Reads that hang keep their file open until they return."""
        with self._mutex:
            segments, self._segments, self._active = list(self._segments.values()), {}, None
            for segment in segments:
                segment.removed = True
        for segment in segments:
            if segment.num_users == 0:
                self.disk.close(segment.fd)
        if self._lock_fd >= 0:
            self.disk.unlock(self._lock_fd)
            self._lock_fd = -1

    @contextlib.contextmanager
    def _in_use(self, number: int) -> Iterator[_Segment]:
        with self._mutex:
            segment = self._segments[number]
            segment.num_users += 1
        try:
            yield segment
        finally:
            with self._mutex:
                segment.num_users -= 1
                last = segment.removed and segment.num_users == 0
            if last:
                self.disk.close(segment.fd)

    def _start_segment(self, num_bytes: int) -> _Segment:
        if self._lock_fd < 0:
            raise CacheStoreFullError("the store is closed")
        file_bytes = max(self.segment_bytes, num_bytes)
        if self.file_bytes + file_bytes > self.capacity_bytes:
            raise CacheStoreFullError
        number = max(self._segments, default=-1) + 1
        path = self.directory / f"{number:010d}{SUFFIX}"
        fd = self.disk.open(path, create=True)
        try:
            self.disk.allocate(fd, file_bytes)
        except OSError:
            self.disk.close(fd)
            self.disk.remove(path)
            raise
        self._active = _Segment(number, path, fd, file_bytes)
        with self._mutex:
            self._segments[number] = self._active
        return self._active

    def _reopen(self, path: Path) -> list[tuple[RecordHeader, Place]]:
        """Records of a segment. Only the last can be torn: its payload is checked. Behind a header that is none the
        next one is looked for, page by page; a file that the disk cannot read is given up."""
        number = int(path.stem)
        fd = self.disk.open(path)
        segment = self._segments[number] = _Segment(number, path, fd, self.disk.size(fd))
        found: list[tuple[RecordHeader, Place]] = []
        page = aligned_buffer(HEADER_BYTES)
        offset = 0
        try:
            while offset < segment.file_bytes:
                header = unpack_header(page[: self.disk.read(fd, page, offset)])
                if header is None or offset + header.num_bytes > segment.file_bytes:
                    offset += HEADER_BYTES
                    continue
                found.append((header, Place(number, offset, header.num_bytes)))
                offset += header.num_bytes
            while found and not self._is_whole(*found[-1]):
                found.pop()
            end = found[-1][1].offset + found[-1][1].num_bytes if found else 0
            segment.used_bytes = segment.file_bytes = end
            self.disk.truncate(fd, end)
        except OSError as error:
            _log.warning("%s cannot be read and is given up: %s", path, error)
            found = []
        if not found:
            self.remove(number)
        return [(header, place) for header, place in found if not header.dead]

    def _files(self) -> list[Path]:
        """Ours; a file of another name is somebody else's."""
        return [path for path in self.disk.files(self.directory, SUFFIX) if path.stem.isdecimal()]

    def _is_whole(self, header: RecordHeader, place: Place) -> bool:
        try:
            self.read(place, header.block_hash, aligned_buffer(place.num_bytes))
        except BlockCorruptError:
            return header.dead
        return True

    def _check_room(self) -> None:
        wanted = self.capacity_bytes - self.file_bytes
        free = self.disk.free_bytes(self.directory)
        if wanted > free:
            raise CacheStoreError(
                f"swap_space wants {wanted / 2**30:.1f} GiB more in {self.directory}, {free / 2**30:.1f} GiB are free"
            )


def smallest_capacity(payload_bytes: int) -> int:
    """Less than this holds no block beside the one that is being written."""
    return 4 * record_bytes(payload_bytes)
