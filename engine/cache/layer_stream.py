"""Parts of blocks, a few layers of each, from the SSD into memory that a step reads. Verified, and waited for."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.cache.block import BlockHash
from engine.cache.compression import Compression
from engine.cache.disk import ALIGNMENT, padded
from engine.cache.disk_tier import DiskTier
from engine.cache.readers import Readers
from engine.cache.record import HEADER_BYTES, body_checksum
from engine.errors import BlockCorruptError, ColdReadError

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
"""How often who waits for a part asks whether the disk hangs."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes start:end of every block."""

    start: int
    end: int

    @property
    def pages(self) -> slice:
        """The aligned range around it in the body of a record, which is what a disk can read."""
        return slice(self.start // ALIGNMENT * ALIGNMENT, padded(self.end))


@dataclass(slots=True, eq=False)
class PartLoad:
    """One part of several blocks on its way; nothing is written to its places once it is `done` or given up."""

    num_open: int
    is_given_up: bool = False
    lost: BlockHash | None = None
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def give_up(self) -> None:
        """After this nobody writes to its places: a reader that is copying holds the lock."""
        with self.lock:
            self.is_given_up = True


@dataclass(frozen=True, slots=True)
class _Sums:
    """Checksums of a block's parts, taken when the whole of it was read and found right."""

    parts: Sequence[Part]
    by_part: tuple[int, ...]


class LayerStream:
    """Reads the same parts of the same blocks again and again.

    The first read of a block is of the whole record, whose checksum covers everything; after it parts alone are read,
    each against a checksum of its own. A block that is stored compressed is always read whole."""

    def __init__(self, tier: DiskTier, readers: Readers, bytes_per_block: int) -> None:
        self.tier = tier
        self.readers = readers
        self.bytes_per_block = bytes_per_block
        self.num_bytes = 0
        self._sums: dict[BlockHash, _Sums] = {}
        self._lock = threading.Lock()

    def fetch(
        self, hashes: Sequence[BlockHash], parts: Sequence[Part], number: int, place_of: Callable[[int], memoryview]
    ) -> PartLoad:
        """Begin to read part `number` of each block into `place_of(index)`, which takes it whole."""
        load = PartLoad(len(hashes))
        if not hashes:
            load.done.set()
        for index, block_hash in enumerate(hashes):
            self.readers.put(_PartRead(self, load, block_hash, parts, number, place_of(index)))
        return load

    def wait(self, load: PartLoad) -> None:
        """Until all of it has come, however late. Raises ColdReadError for what is lost, and when the disk hangs."""
        while not load.done.wait(LOOK_SECONDS):
            if self.readers.is_hung:
                load.give_up()
                raise ColdReadError("the SSD does not answer", is_hung=True)
        if load.lost is not None:
            raise ColdReadError(f"block {load.lost.hex()[:12]} could not be read back from the SSD")

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """These are no longer streamed."""
        with self._lock:
            for block_hash in hashes:
                self._sums.pop(block_hash, None)

    def read(self, block_hash: BlockHash, parts: Sequence[Part], number: int, buffer: memoryview) -> memoryview | None:
        """In a reader's thread: the bytes of one part, in `buffer`; None for a block that is lost."""
        part = parts[number]
        sums = self._sums.get(block_hash)
        if sums is not None and sums.parts == parts:
            pages = buffer[: part.pages.stop - part.pages.start]
            is_there = self.tier.read_pages(block_hash, HEADER_BYTES + part.pages.start, pages)
            if is_there and body_checksum(pages) == sums.by_part[number]:
                first = part.start - part.pages.start
                return pages[first : first + part.end - part.start]
        block = self._read_whole(block_hash, parts, buffer)
        return None if block is None else block[part.start : part.end]

    def _read_whole(self, block_hash: BlockHash, parts: Sequence[Part], buffer: memoryview) -> memoryview | None:
        got = self.tier.read(block_hash, buffer)
        if got is None:
            return None
        header, payload = got
        if header.compressed:
            try:
                payload = Compression.unpack(payload, header.raw_bytes)
            except BlockCorruptError as error:
                _log.warning("dropped a block of the SSD tier: %s", error)
                self.tier.drop_corrupt(block_hash)
                return None
        if len(payload) != self.bytes_per_block:
            return None
        if not header.compressed:
            body = buffer[HEADER_BYTES : header.num_bytes]
            sums = _Sums(parts, tuple(body_checksum(body[part.pages]) for part in parts))
            with self._lock:
                self._sums[block_hash] = sums
        return payload

    def count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes


@dataclass(slots=True, eq=False)
class _PartRead:
    """One block of a `PartLoad`."""

    stream: LayerStream
    load: PartLoad
    block_hash: BlockHash
    parts: Sequence[Part]
    number: int
    place: memoryview
    has_come: bool = False

    @property
    def is_unwanted(self) -> bool:
        return self.load.is_given_up

    def run(self, buffer: memoryview, since: float) -> None:
        data = self.stream.read(self.block_hash, self.parts, self.number, buffer)
        if data is None:
            return
        with self.load.lock:
            if not self.load.is_given_up:
                self.place[: len(data)] = data
        self.stream.count(len(data))
        self.has_come = True

    def ended(self) -> None:
        with self.load.lock:
            if not self.has_come:
                self.load.lost = self.block_hash
            self.load.num_open -= 1
            is_last = not self.load.num_open
        if is_last:
            self.load.done.set()
