"""What the SSD tier holds: its index, what is admitted, what goes when space is needed. Blocks of bytes, no tensors."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.cache.block import BlockHash
from engine.cache.cold_admission import ColdAdmission
from engine.cache.history import load_history, save_history
from engine.cache.record import HEADER_BYTES, RecordHeader, unpack_header
from engine.cache.segments import Place, SegmentStore
from engine.cache.store_writer import StoreWriter
from engine.cache.tier_index import Entry, TierIndex
from engine.errors import BlockCorruptError, CacheStoreFullError

_log = logging.getLogger(__name__)

REST_SECONDS = 60.0
"""How long a directory gets no writes after one of them failed."""


@dataclass(slots=True)
class TierCounters:
    """Totals since the start."""

    blocks_written: int = 0
    bytes_written: int = 0
    bytes_rewritten: int = 0
    bytes_read: int = 0
    evictions: int = 0
    corrupt: int = 0
    missing: int = 0
    write_errors: int = 0

    @property
    def write_amplification(self) -> float:
        return (self.bytes_written + self.bytes_rewritten) / self.bytes_written if self.bytes_written else 1.0


class DiskTier:
    """Blocks by their hash over the stores of all directories. Thread-safe; `write` belongs to one thread.

    What cannot be read leaves the index for good."""

    def __init__(
        self,
        stores: Sequence[SegmentStore],
        *,
        admission: ColdAdmission = ColdAdmission.ROOM,
        clock: Callable[[], float] = time.monotonic,
        is_open: bool = False,
    ) -> None:
        self.stores = stores
        self.index = TierIndex()
        self._admission = admission
        self.is_open = is_open
        self._clock = clock
        self._counters = TierCounters()
        self._writers = [StoreWriter(number, store, self.index, self.read) for number, store in enumerate(stores)]
        self._resting_until: dict[int, float] = {}
        self._turn = 0
        self._lock = threading.Lock()  # of the counters

    def __repr__(self) -> str:
        return f"DiskTier(blocks={self.num_blocks}, bytes={self.file_bytes})"

    def open(self) -> None:
        """Take the directories and index what lies in them; until then the tier is empty and wants nothing. Raises
        CacheStoreError, with no directory taken."""
        found: list[tuple[BlockHash, Entry]] = []
        opened: list[SegmentStore] = []
        try:
            for number, store in enumerate(self.stores):
                found += [(header.block_hash, Entry(number, place, header.depth)) for header, place in store.open()]
                opened.append(store)
        except BaseException:  # whatever it was, no directory stays locked
            for store in opened:
                store.close()
            raise
        self.index.restore(found, load_history(self.stores[0].directory))
        self.is_open = True

    def remember(self) -> None:
        """Keep the history on the disk; a directory that takes no file only costs the next warm start."""
        try:
            save_history(self.stores[0].directory, self.index.history())
        except OSError as error:
            _log.warning("the history of the SSD tier could not be kept: %s", error)

    def close(self) -> None:
        if self.is_open:
            self.remember()
            self.is_open = False
            self.index.clear()
            for store in self.stores:
                store.close()

    @property
    def counters(self) -> TierCounters:
        """As they are now."""
        self._counters.bytes_rewritten = sum(writer.bytes_rewritten for writer in self._writers)
        self._counters.evictions = sum(writer.evictions for writer in self._writers)
        return self._counters

    @property
    def num_blocks(self) -> int:
        return len(self.index)

    @property
    def file_bytes(self) -> int:
        return sum(store.file_bytes for store in self.stores)

    @property
    def capacity_bytes(self) -> int:
        return sum(store.capacity_bytes for store in self.stores)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self.index

    def max_pinned(self, payload_bytes: int) -> int:
        """So many blocks may be pinned, however they come to lie."""
        return sum(writer.max_pinned(payload_bytes) for writer in self._writers)

    def wants(self, block_hash: BlockHash, *, at_once: bool = False) -> bool:
        """Whether a block that was just written or found should come here; `at_once` does without a second touch.

        The answer yes is a promise to `write` it, or to call `declined`."""
        at_once = at_once or not self._admission.waits(self.file_bytes, self.capacity_bytes)
        return self.is_open and self.index.wants(block_hash, at_once=at_once)

    def declined(self, block_hash: BlockHash) -> None:
        """A block that was wanted does not come; it may be asked for again."""
        self.index.declined(block_hash)

    def write(self, header: RecordHeader, record: memoryview) -> bool:
        """Store a record that was wanted, making room as needed; False where no directory takes it."""
        try:
            appended = self._append(record)
            if appended is None:
                return False
            store, place = appended
            self.index.put(header.block_hash, Entry(store, place, header.depth))
            with self._lock:
                self._counters.blocks_written += 1
                self._counters.bytes_written += len(record)
            return True
        finally:
            self.declined(header.block_hash)

    def read(self, block_hash: BlockHash, buffer: memoryview) -> tuple[RecordHeader, memoryview] | None:
        """The header and stored payload in `buffer`; None for a block that is not here or cannot be read any more."""
        entry, moving = self.index.find(block_hash)
        if entry is None:
            return None
        if moving is not None and (found := unpack_header(moving)) is not None:
            buffer[: len(moving)] = moving
            return found, buffer[HEADER_BYTES : HEADER_BYTES + found.stored_bytes]
        try:
            header, payload = self.stores[entry.store].read(entry.place, block_hash, buffer)
        except BlockCorruptError as error:
            _log.warning("dropped a block of the SSD tier: %s", error)
            self.drop_corrupt(block_hash, entry)
            return None
        except (OSError, KeyError) as error:
            if not self.index.forget(block_hash, entry):  # it has moved, or has gone
                return self.read(block_hash, buffer)
            self._counters.missing += 1
            _log.warning("dropped a block of the SSD tier: %s", error)
            return None
        with self._lock:
            self._counters.bytes_read += entry.place.num_bytes
        return header, payload

    def read_pages(self, block_hash: BlockHash, first: int, pages: memoryview) -> bool:
        """Fill `pages` from byte `first` of the stored record on, both aligned and unchecked; False where that fails,
        which leaves the block to `read`."""
        entry, moving = self.index.find(block_hash)
        if entry is None or moving is not None or first + len(pages) > entry.place.num_bytes:
            return False
        try:
            self.stores[entry.store].read_pages(entry.place, first, pages)
        except (OSError, KeyError):
            return False
        with self._lock:
            self._counters.bytes_read += len(pages)
        return True

    def drop_corrupt(self, block_hash: BlockHash, entry: Entry | None = None) -> None:
        """A block turned out to be damaged: it is never looked up again, nor after a restart."""
        entry = entry or self.index.find(block_hash)[0]
        if entry is None or not self.index.forget(block_hash, entry):
            return
        self._counters.corrupt += 1
        stored = entry.place.num_bytes
        dead = RecordHeader(block_hash, entry.depth, 0, stored - HEADER_BYTES, 0, dead=True)
        try:
            self.stores[entry.store].kill(entry.place, dead)
        except (OSError, KeyError) as error:
            _log.warning("a damaged block could not be marked: %s", error)

    def _append(self, record: memoryview) -> tuple[int, Place] | None:
        """Try the directories in turn, those that failed lately left out."""
        for _ in self.stores:
            number = self._turn = (self._turn + 1) % len(self.stores)
            if self._clock() < self._resting_until.get(number, 0.0):
                continue
            try:
                return number, self._writers[number].append(record)
            except (OSError, CacheStoreFullError) as error:
                self._counters.write_errors += 1
                if self.index.pinned and isinstance(error, CacheStoreFullError):
                    continue  # it is not the directory that refuses
                self._resting_until[number] = self._clock() + REST_SECONDS
                _log.warning("%s takes no blocks for a minute: %s", self.stores[number].directory, error)
        return None

    def check(self) -> None:
        """Every block lies within a segment that exists, and no store is larger than it may be."""
        for store in self.stores:
            assert store.file_bytes <= store.capacity_bytes, f"{store.directory} is larger than it may be"
        self.index.check(lambda entry: self.stores[entry.store].used_bytes(entry.place.segment))
