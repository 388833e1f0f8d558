"""What the SSD tier knows of its blocks: where each lies, how it was used, which are wanted and which may not go."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from engine.cache.block import BlockHash
from engine.cache.segments import Place


@dataclass(slots=True)
class Entry:
    """`store` is the number of the directory."""

    store: int
    place: Place
    depth: int
    num_uses: int = 0


@dataclass(slots=True)
class TierIndex:
    """Blocks by their hash, the least recently used first; of one use the leaf before its prefix. Thread-safe."""

    max_seen: int = 100_000
    pinned: set[BlockHash] = field(default_factory=set)
    _entries: OrderedDict[BlockHash, Entry] = field(default_factory=OrderedDict)
    _seen: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)
    _coming: set[BlockHash] = field(default_factory=set)
    _moving: dict[BlockHash, memoryview] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._entries

    def find(self, block_hash: BlockHash) -> tuple[Entry | None, memoryview | None]:
        """Where a block lies, and its record where it is about to lie elsewhere."""
        with self._lock:
            return self._entries.get(block_hash), self._moving.get(block_hash)

    def snapshot(self) -> tuple[list[tuple[BlockHash, Entry]], set[BlockHash]]:
        """All blocks in the order of their use, and the pinned ones: a copy, since others wait for the lock."""
        with self._lock:
            return list(self._entries.items()), set(self.pinned)

    def restore(self, found: Iterable[tuple[BlockHash, Entry]], history: Iterable[tuple[BlockHash, int]]) -> None:
        """What an earlier process left, oldest first, and how often it was used."""
        with self._lock:
            for block_hash, entry in found:
                self._entries.pop(block_hash, None)
                self._entries[block_hash] = entry
            for block_hash, num_uses in history:
                if block_hash in self._entries:
                    self._entries[block_hash].num_uses = num_uses
                    self._entries.move_to_end(block_hash)

    def put(self, block_hash: BlockHash, entry: Entry) -> bool:
        """A block lies there now; whether it was not here before."""
        with self._lock:
            is_new = block_hash not in self._entries
            self._entries[block_hash] = entry
            self._seen.pop(block_hash, None)
            self._moving.pop(block_hash, None)
            return is_new

    def forget(self, block_hash: BlockHash, entry: Entry | None = None) -> bool:
        """A block is gone, if it lies where `entry` says."""
        with self._lock:
            found = self._entries.get(block_hash)
            if found is None or (entry is not None and entry is not found):
                return False
            del self._entries[block_hash]
            self._moving.pop(block_hash, None)
            return True

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def take_out(
        self, hashes: Iterable[BlockHash], moving: dict[BlockHash, memoryview], pinned: set[BlockHash]
    ) -> dict[BlockHash, Entry] | None:
        """Forget blocks whose segment goes, but for those that are `moving`, whose records are read meanwhile; where
        they all lay. None, and nothing is done, if one was pinned that is not among `pinned`."""
        with self._lock:
            if not self.pinned.isdisjoint(set(hashes) - pinned):
                return None
            entries = {h: self._entries[h] for h in hashes if h in self._entries}
            # others may be on their way still, for which this segment goes
            self._moving.update((h, record) for h, record in moving.items() if h in entries)
            for block_hash, entry in entries.items():
                if block_hash in moving:
                    self._entries[block_hash] = replace(entry)  # who reads at the old place finds out that it is old
                else:
                    del self._entries[block_hash]
            return entries

    def num_leading(self, hashes: Sequence[BlockHash]) -> int:
        """How many of the hashes, from the first on, are here."""
        with self._lock:
            for count, block_hash in enumerate(hashes):
                if block_hash not in self._entries:
                    return count
        return len(hashes)

    def pin_leading(self, hashes: Sequence[BlockHash]) -> int:
        """Pin those that are here, up to the first that is not; how many."""
        with self._lock:
            count = self.num_leading(hashes)
            self.pinned.update(hashes[:count])
        return count

    def pin(self, block_hash: BlockHash) -> None:
        """Whether it is here already or still to come, the block does not go until it is unpinned."""
        with self._lock:
            self.pinned.add(block_hash)

    def unpin(self, hashes: Iterable[BlockHash]) -> None:
        with self._lock:
            self.pinned.difference_update(hashes)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """These were used, in the order of their chain."""
        with self._lock:
            for block_hash in reversed(hashes):
                entry = self._entries.get(block_hash)
                if entry is not None:
                    entry.num_uses += 1
                    self._entries.move_to_end(block_hash)

    def wants(self, block_hash: BlockHash, *, at_once: bool = False) -> bool:
        """Whether a block should come here: only when it is seen again, unless `at_once`."""
        with self._lock:
            if block_hash in self._entries or block_hash in self._coming:
                return False
            if not at_once and block_hash not in self._seen:
                self._seen[block_hash] = None
                if len(self._seen) > self.max_seen:
                    self._seen.popitem(last=False)
                return False
            self._coming.add(block_hash)
            return True

    def declined(self, block_hash: BlockHash) -> None:
        with self._lock:
            self._coming.discard(block_hash)

    def history(self) -> list[tuple[BlockHash, int]]:
        """How often each used block was used, the least recently used first."""
        return [(block_hash, entry.num_uses) for block_hash, entry in self.snapshot()[0] if entry.num_uses]

    def newest(self) -> BlockHash | None:
        """The block that was used or written last."""
        with self._lock:
            return next(reversed(self._entries), None)

    def hottest(self, limit: int) -> list[BlockHash]:
        """The most used blocks, a prefix before what follows it; blocks that nobody used are not among them."""
        used = [(-entry.num_uses, entry.depth, h) for h, entry in self.snapshot()[0] if entry.num_uses]
        return [block_hash for _, _, block_hash in sorted(used)[:limit]]

    def check(self, used_bytes: Callable[[Entry], int]) -> None:
        """Every block lies within what is used of its segment, but for those that are about to lie elsewhere."""
        with self._lock:
            for block_hash, entry in self._entries.items():
                if block_hash not in self._moving:
                    end = entry.place.offset + entry.place.num_bytes
                    assert end <= used_bytes(entry), f"{block_hash.hex()} lies outside"
