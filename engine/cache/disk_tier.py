"""What the SSD tier holds: its index, what is admitted, what goes when space is needed. Blocks of bytes, no tensors."""

import errno
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.cache.block import BlockHash
from engine.cache.disk import aligned_buffer
from engine.cache.history import load_history, save_history
from engine.cache.record import HEADER_BYTES, RecordHeader, record_bytes, unpack_header
from engine.cache.segments import Place, SegmentStore
from engine.errors import BlockCorruptError, CacheStoreFullError

_log = logging.getLogger(__name__)

SURVIVING_SHARE = 0.2
"""Of a segment that goes, what may be appended again: write amplification stays below 1 / (1 - 0.2) = 1.25."""
PINNED_SHARE = 0.75
"""A segment with more pinned blocks does not go: moving them would win next to nothing."""
REST_SECONDS = 60.0
"""How long a directory gets no writes after one of them failed."""


@dataclass(slots=True)
class _Entry:
    store: int
    place: Place
    depth: int
    num_uses: int = 0


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


@dataclass(slots=True)
class DiskTier:
    """Blocks by their hash over the stores of all directories. Thread-safe; `write` belongs to one thread.

    Least recently used first, and of one use the leaf before its prefix. With `second_touch` a block is wanted when it
    is seen for the second time. What cannot be read leaves the index for good."""

    stores: Sequence[SegmentStore]
    second_touch: bool = True
    max_seen: int = 100_000
    clock: Callable[[], float] = time.monotonic
    counters: TierCounters = field(default_factory=TierCounters)
    _index: OrderedDict[BlockHash, _Entry] = field(default_factory=OrderedDict)
    _seen: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)
    _coming: set[BlockHash] = field(default_factory=set)
    _pinned: set[BlockHash] = field(default_factory=set)
    _moving: dict[BlockHash, memoryview] = field(default_factory=dict)
    _resting_until: dict[int, float] = field(default_factory=dict)
    _turn: int = 0
    is_open: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __repr__(self) -> str:
        return f"DiskTier(blocks={self.num_blocks}, bytes={self.file_bytes})"

    def open(self) -> None:
        """Take the directories and index what lies in them; until then the tier is empty and wants nothing. Raises
        CacheStoreError, with no directory taken."""
        found: list[tuple[int, RecordHeader, Place]] = []
        opened: list[SegmentStore] = []
        try:
            for number, store in enumerate(self.stores):
                found += [(number, header, place) for header, place in store.open()]
                opened.append(store)
        except BaseException:  # whatever it was, no directory stays locked
            for store in opened:
                store.close()
            raise
        history = load_history(self.stores[0].directory)
        with self._lock:
            for number, header, place in found:
                self._index.pop(header.block_hash, None)
                self._index[header.block_hash] = _Entry(number, place, header.depth)
            for block_hash, num_uses in history:
                if block_hash in self._index:
                    self._index[block_hash].num_uses = num_uses
                    self._index.move_to_end(block_hash)
            self.is_open = True

    def remember(self) -> None:
        """Keep the history on the disk; a directory that takes no file only costs the next warm start."""
        with self._lock:
            history = [(block_hash, entry.num_uses) for block_hash, entry in self._index.items() if entry.num_uses]
        try:
            save_history(self.stores[0].directory, history)
        except OSError as error:
            _log.warning("the history of the SSD tier could not be kept: %s", error)

    def close(self) -> None:
        if self.is_open:
            self.remember()
            with self._lock:
                self._index.clear()
                self.is_open = False
            for store in self.stores:
                store.close()

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def file_bytes(self) -> int:
        return sum(store.file_bytes for store in self.stores)

    @property
    def capacity_bytes(self) -> int:
        return sum(store.capacity_bytes for store in self.stores)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._index

    def num_leading(self, hashes: Sequence[BlockHash]) -> int:
        """How many of the hashes, from the first on, are here."""
        with self._lock:
            for count, block_hash in enumerate(hashes):
                if block_hash not in self._index:
                    return count
        return len(hashes)

    def max_pinned(self, payload_bytes: int) -> int:
        """So many blocks may be pinned, however they lie, while each store keeps a segment for what is written."""
        size = record_bytes(payload_bytes)
        segments = [
            (store.capacity_bytes // store.segment_bytes - 1, store.segment_bytes // size) for store in self.stores
        ]
        return int(PINNED_SHARE * sum(max(0, num_segments) * num_blocks for num_segments, num_blocks in segments))

    def pin_leading(self, hashes: Sequence[BlockHash]) -> int:
        """Pin those that are here, up to the first that is not; how many."""
        with self._lock:
            count = self.num_leading(hashes)
            self._pinned.update(hashes[:count])
        return count

    def pin(self, block_hash: BlockHash) -> None:
        """Whether it is here already or still to come, the block does not go until it is unpinned."""
        with self._lock:
            self._pinned.add(block_hash)

    def unpin(self, hashes: Iterable[BlockHash]) -> None:
        with self._lock:
            self._pinned.difference_update(hashes)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """These were used, in the order of their chain."""
        with self._lock:
            for block_hash in reversed(hashes):
                entry = self._index.get(block_hash)
                if entry is not None:
                    entry.num_uses += 1
                    self._index.move_to_end(block_hash)

    def wants(self, block_hash: BlockHash, *, at_once: bool = False) -> bool:
        """Whether a block that was just written or found should come here; `at_once` does without the second touch.

        The answer yes is a promise to `write` it, or to call `declined`."""
        with self._lock:
            if not self.is_open or block_hash in self._index or block_hash in self._coming:
                return False
            if self.second_touch and not at_once and block_hash not in self._seen:
                self._seen[block_hash] = None
                if len(self._seen) > self.max_seen:
                    self._seen.popitem(last=False)
                return False
            self._coming.add(block_hash)
            return True

    def declined(self, block_hash: BlockHash) -> None:
        """A block that was wanted does not come; it may be asked for again."""
        with self._lock:
            self._coming.discard(block_hash)

    def write(self, header: RecordHeader, record: memoryview) -> bool:
        """Store a record that was wanted, making room as needed; False where no directory takes it."""
        try:
            appended = self._append(record)
            if appended is None:
                return False
            store, place = appended
            with self._lock:
                self._index[header.block_hash] = _Entry(store, place, header.depth)
                self._seen.pop(header.block_hash, None)
                self.counters.blocks_written += 1
                self.counters.bytes_written += len(record)
            return True
        finally:
            self.declined(header.block_hash)

    def read(self, block_hash: BlockHash, buffer: memoryview) -> tuple[RecordHeader, memoryview] | None:
        """The header and stored payload in `buffer`; None for a block that is not here or cannot be read any more."""
        with self._lock:
            entry, moving = self._index.get(block_hash), self._moving.get(block_hash)
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
            if self._forget(block_hash, entry):
                self.counters.missing += 1
                _log.warning("dropped a block of the SSD tier: %s", error)
            return None
        with self._lock:
            self.counters.bytes_read += entry.place.num_bytes
        return header, payload

    def read_pages(self, block_hash: BlockHash, first: int, pages: memoryview) -> bool:
        """Fill `pages` from byte `first` of the stored record on, both aligned and unchecked; False where that fails,
        which leaves the block to `read`."""
        with self._lock:
            entry, moving = self._index.get(block_hash), self._moving.get(block_hash)
        if entry is None or moving is not None or first + len(pages) > entry.place.num_bytes:
            return False
        try:
            self.stores[entry.store].read_pages(entry.place, first, pages)
        except (OSError, KeyError):
            return False
        with self._lock:
            self.counters.bytes_read += len(pages)
        return True

    def drop_corrupt(self, block_hash: BlockHash, entry: "_Entry | None" = None) -> None:
        """A block turned out to be damaged: it is never looked up again, nor after a restart."""
        entry = entry or self._index.get(block_hash)
        if entry is None or not self._forget(block_hash, entry):
            return
        self.counters.corrupt += 1
        stored = entry.place.num_bytes
        dead = RecordHeader(block_hash, entry.depth, 0, stored - HEADER_BYTES, 0, dead=True)
        try:
            self.stores[entry.store].kill(entry.place, dead)
        except (OSError, KeyError) as error:
            _log.warning("a damaged block could not be marked: %s", error)

    def newest(self) -> BlockHash | None:
        """The block that was used or written last."""
        with self._lock:
            return next(reversed(self._index), None)

    def hottest(self, limit: int) -> list[BlockHash]:
        """The most used blocks, a prefix before what follows it; blocks that nobody used are not among them."""
        with self._lock:
            index = list(self._index.items())
        used = [(-entry.num_uses, entry.depth, block_hash) for block_hash, entry in index if entry.num_uses]
        return [block_hash for _, _, block_hash in sorted(used)[:limit]]

    def _append(self, record: memoryview) -> tuple[int, Place] | None:
        """Try the directories in turn, those that failed lately left out."""
        for _ in self.stores:
            number = self._turn = (self._turn + 1) % len(self.stores)
            if self.clock() < self._resting_until.get(number, 0.0):
                continue
            try:
                return number, self._append_to(number, record)
            except (OSError, CacheStoreFullError) as error:
                self.counters.write_errors += 1
                if self._pinned and isinstance(error, CacheStoreFullError):
                    continue  # it is not the directory that refuses
                self._resting_until[number] = self.clock() + REST_SECONDS
                _log.warning("%s takes no blocks for a minute: %s", self.stores[number].directory, error)
        return None

    def _append_to(self, number: int, record: memoryview) -> Place:
        store, disk_was_full = self.stores[number], False
        while True:
            try:
                return store.append(record)
            except CacheStoreFullError:
                if not store.sealed:
                    raise
            except OSError as error:  # others fill the disk too: what is ours gives way, once
                if error.errno != errno.ENOSPC or disk_was_full or not store.sealed:
                    raise
                disk_was_full = True
            if not self._remove_coldest(number):
                raise CacheStoreFullError("every segment has a block that may not go")

    def _remove_coldest(self, number: int) -> bool:
        """Give back the segment with the fewest pinned bytes and, of equals, the least live weight. Its pinned blocks
        and its hot ones are appended again once it has gone; pinned ones can be read all the while. False where every
        segment is full of pinned blocks.

        A block weighs its bytes times its rank in the order of use; hot are used ones in the later half of it."""
        store = self.stores[number]
        with self._lock:  # only to copy: the engine's thread waits for this lock
            index, pinned = list(self._index.items()), set(self._pinned)
        weights = dict.fromkeys(store.sealed, 0)
        num_pinned_bytes = dict.fromkeys(weights, 0)
        kept: dict[int, list[tuple[BlockHash, _Entry]]] = {segment: [] for segment in weights}
        hot: dict[int, list[tuple[BlockHash, _Entry]]] = {segment: [] for segment in weights}
        for rank, (block_hash, entry) in enumerate(index):
            if entry.store == number and (segment := entry.place.segment) in weights:
                weights[segment] += (rank + 1) * entry.place.num_bytes
                if block_hash in pinned:
                    num_pinned_bytes[segment] += entry.place.num_bytes
                    kept[segment].append((block_hash, entry))
                elif entry.num_uses and rank >= len(index) // 2:
                    hot[segment].append((block_hash, entry))
        victim = min(weights, key=lambda segment: (num_pinned_bytes[segment], weights[segment], segment))
        if num_pinned_bytes[victim] > PINNED_SHARE * store.used_bytes(victim):
            return False
        moving = self._read_back(kept[victim], None)
        saved = self._read_back(hot[victim], SURVIVING_SHARE * store.segment_bytes)
        gone = [h for h, entry in index if (entry.store, entry.place.segment) == (number, victim)]
        with self._lock:  # nobody but this thread adds blocks, so none has come to a sealed segment
            if not self._pinned.isdisjoint(set(gone) - pinned):
                return True  # pinned meanwhile: the caller finds the store still full, and asks again
            self._moving = moving
            entries = {h: self._index[h] for h in gone if h in self._index}
            for block_hash in entries.keys() - moving.keys():
                del self._index[block_hash]
                self.counters.evictions += 1
        store.remove(victim)
        for block_hash, record in (*moving.items(), *saved.items()):
            if (before := entries.get(block_hash)) is not None:
                self._append_again(number, block_hash, before, record)
        return True

    def _append_again(self, number: int, block_hash: BlockHash, before: _Entry, record: memoryview) -> None:
        """A block whose segment has gone. Where a segment that was cut short gave too little for all, it goes too."""
        try:
            place = self.stores[number].append(record)
        except (CacheStoreFullError, OSError) as error:
            _log.warning("a block of the SSD tier could not be moved: %s", error)
            with self._lock:
                self._moving.pop(block_hash, None)
                self.counters.evictions += self._index.pop(block_hash, None) is not None
            return
        with self._lock:
            self.counters.evictions -= block_hash not in self._index
            self._index[block_hash] = _Entry(number, place, before.depth, before.num_uses)
            self._moving.pop(block_hash, None)
            self.counters.bytes_rewritten += len(record)

    def _read_back(
        self, blocks: list[tuple[BlockHash, _Entry]], max_bytes: float | None
    ) -> dict[BlockHash, memoryview]:
        """Whole records of blocks, the hottest first, up to so many bytes."""
        room = float("inf") if max_bytes is None else max_bytes
        saved: dict[BlockHash, memoryview] = {}
        for block_hash, entry in reversed(blocks):
            room -= entry.place.num_bytes
            if room < 0:
                break
            record = aligned_buffer(entry.place.num_bytes)
            if self.read(block_hash, record) is not None:
                saved[block_hash] = record
        return saved

    def _forget(self, block_hash: BlockHash, entry: _Entry) -> bool:
        with self._lock:
            if self._index.get(block_hash) is not entry:
                return False
            del self._index[block_hash]
            return True

    def check(self) -> None:
        """Every block lies within a segment that exists, and no store is larger than it may be."""
        with self._lock:
            for store in self.stores:
                assert store.file_bytes <= store.capacity_bytes, f"{store.directory} is larger than it may be"
            for block_hash, entry in self._index.items():
                used = self.stores[entry.store].used_bytes(entry.place.segment)
                assert entry.place.offset + entry.place.num_bytes <= used, f"{block_hash.hex()} lies outside"
