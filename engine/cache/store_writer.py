"""Appends to one directory of the SSD tier, and makes the room for it: which segment goes, and what of it stays."""

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.cache.block import BlockHash
from engine.cache.disk import aligned_buffer
from engine.cache.record import RecordHeader, record_bytes
from engine.cache.segments import Place, SegmentStore
from engine.cache.tier_index import Entry, TierIndex
from engine.errors import CacheStoreFullError

_log = logging.getLogger(__name__)

SURVIVING_SHARE = 0.2
"""Of a segment that goes, what may be appended again: write amplification stays below 1 / (1 - 0.2) = 1.25."""
PINNED_SHARE = 0.75
"""A segment with more pinned blocks does not go: moving them would win next to nothing."""

ReadRecord = Callable[[BlockHash, memoryview], tuple[RecordHeader, memoryview] | None]


@dataclass(slots=True)
class _Segment:
    """What lies in a segment that may go: its weight, and the blocks that would be appended again."""

    weight: int = 0
    num_pinned_bytes: int = 0
    pinned: list[tuple[BlockHash, Entry]] = field(default_factory=list)
    hot: list[tuple[BlockHash, Entry]] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)


@dataclass(slots=True)
class StoreWriter:
    """Belongs to one thread, the only one that adds blocks. `read` gives a whole record, if it is still right."""

    number: int
    store: SegmentStore
    index: TierIndex
    read: ReadRecord
    bytes_rewritten: int = 0
    evictions: int = 0

    def max_pinned(self, payload_bytes: int) -> int:
        """So many blocks may be pinned, however they lie, while a segment is kept for what is written."""
        num_segments = self.store.capacity_bytes // self.store.segment_bytes - 1
        num_blocks = self.store.segment_bytes // record_bytes(payload_bytes)
        return int(PINNED_SHARE * max(0, num_segments) * num_blocks)

    def append(self, record: memoryview) -> Place:
        """Write a record. Raises OSError for what the disk says, CacheStoreFullError where nothing may go for it."""
        disk_was_full = False
        while True:
            try:
                return self.store.append(record)
            except CacheStoreFullError:
                if not self.store.sealed:
                    raise
            except OSError as error:  # others fill the disk too: what is ours gives way, once
                if error.errno != errno.ENOSPC or disk_was_full or not self.store.sealed:
                    raise
                disk_was_full = True
            if not self._remove_coldest():
                raise CacheStoreFullError("every segment has blocks that may not go")

    def _remove_coldest(self) -> bool:
        """Give back, of the segments that may go, the one with the fewest pinned bytes and, of equals, the least live
        weight. Its pinned blocks and its hot ones are appended again once it has gone; pinned ones can be read all the
        while. False where every segment is full of pinned blocks."""
        segments, pinned = self._weigh()
        going = {
            number: segment
            for number, segment in segments.items()
            if segment.num_pinned_bytes <= PINNED_SHARE * self.store.used_bytes(number)
        }
        if not going:
            return False
        victim = min(going, key=lambda number: (going[number].num_pinned_bytes, going[number].weight, number))
        moving = self._read_back(going[victim].pinned, None)
        saved = self._read_back(going[victim].hot, SURVIVING_SHARE * self.store.segment_bytes)
        entries = self.index.take_out(going[victim].hashes, moving, pinned)
        if entries is None:
            return True  # one was pinned meanwhile: the caller finds the store still full, and asks again
        self.evictions += len(entries.keys() - moving.keys())
        self.store.remove(victim)
        for records, append in ((moving, self.append), (saved, self.store.append)):
            for block_hash, record in records.items():
                if (before := entries.get(block_hash)) is not None:
                    self._append_again(block_hash, before, record, append)
        return True

    def _weigh(self) -> tuple[dict[int, _Segment], set[BlockHash]]:
        """All segments that take no more, and what is pinned. A block weighs its bytes times its rank in the order of
        use; hot are used ones in the later half of it."""
        index, pinned = self.index.snapshot()
        segments = {number: _Segment() for number in self.store.sealed}
        for rank, (block_hash, entry) in enumerate(index):
            if entry.store != self.number or (segment := segments.get(entry.place.segment)) is None:
                continue
            segment.hashes.append(block_hash)
            segment.weight += (rank + 1) * entry.place.num_bytes
            if block_hash in pinned:
                segment.num_pinned_bytes += entry.place.num_bytes
                segment.pinned.append((block_hash, entry))
            elif entry.num_uses and rank >= len(index) // 2:
                segment.hot.append((block_hash, entry))
        return segments, pinned

    def _append_again(
        self, block_hash: BlockHash, before: Entry, record: memoryview, append: Callable[[memoryview], Place]
    ) -> None:
        """A block whose segment has gone. Where a segment that was cut short gave too little for all, a hot one goes
        too; for a pinned one another segment does."""
        try:
            place = append(record)
        except (CacheStoreFullError, OSError) as error:
            _log.warning("a block of the SSD tier could not be moved: %s", error)
            self.evictions += self.index.forget(block_hash)
            return
        self.evictions -= self.index.put(block_hash, Entry(self.number, place, before.depth, before.num_uses))
        self.bytes_rewritten += len(record)

    def _read_back(self, blocks: list[tuple[BlockHash, Entry]], max_bytes: float | None) -> dict[BlockHash, memoryview]:
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
