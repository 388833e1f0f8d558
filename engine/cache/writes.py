"""Blocks on their way to the SSD: copied out of the KV memory at once, written later by one thread."""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from engine.cache.block import BlockHash
from engine.cache.compression import Compression
from engine.cache.disk import aligned_buffer
from engine.cache.disk_tier import DiskTier
from engine.cache.readers import HUNG_SECONDS
from engine.cache.record import HEADER_BYTES, RecordHeader, body_checksum, record_bytes
from engine.errors import CacheStoreBusyError, CacheStoreError

_log = logging.getLogger(__name__)

OPEN_SECONDS = 1.0
"""How often a tier whose directory is in use asks again."""
REMEMBER_SECONDS = 60.0


class WriteQueue:
    """At most `num_slots` blocks wait; more are declined. The thread also opens a tier whose directory was in use, and
    keeps its history."""

    def __init__(
        self,
        tier: DiskTier,
        bytes_per_block: int,
        num_slots: int,
        *,
        compression: Compression | None = None,
        block_seconds: Callable[[], float],
        opened: Callable[[], None],
        written: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_dropped = 0
        self._told = ""
        self._writing_since: float | None = None
        self._tier = tier
        self._bytes_per_block = bytes_per_block
        self._compression = compression
        self._block_seconds = block_seconds
        self._opened = opened
        self._written = written
        self._clock = clock
        self._remember_at = clock() + REMEMBER_SECONDS
        self._waiting: queue.SimpleQueue[tuple[RecordHeader, memoryview] | None] = queue.SimpleQueue()
        size = record_bytes(bytes_per_block)
        buffer = aligned_buffer(num_slots * size)
        self._free_slots = deque(buffer[i * size : (i + 1) * size] for i in range(num_slots))
        self._num_slots = num_slots
        self._thread = threading.Thread(target=self._run, name="l3-write", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return self._num_slots - len(self._free_slots)

    @property
    def is_hung(self) -> bool:
        """Whether a block is being written for so long that the disk hangs."""
        since = self._writing_since
        return since is not None and self._clock() - since > HUNG_SECONDS

    @property
    def has_room(self) -> bool:
        """Only the caller of `put` takes it away."""
        return bool(self._free_slots)

    def put(self, block_hash: BlockHash, depth: int, block: memoryview) -> bool:
        """Copy a block that the tier wants; False, and declined, if too many wait already."""
        try:
            slot = self._free_slots.popleft()
        except IndexError:
            self.num_dropped += 1
            self._tier.declined(block_hash)
            return False
        size = self._bytes_per_block
        slot[HEADER_BYTES : HEADER_BYTES + size] = block
        self._waiting.put((RecordHeader(block_hash, depth, size, size, 0), slot))
        return True

    def close(self, timeout_seconds: float) -> None:
        """Write what waits; a thread that hangs in the disk is left behind."""
        self._waiting.put(None)
        self._thread.join(timeout=timeout_seconds)

    def _run(self) -> None:
        while not self._tier.is_open:
            with contextlib.suppress(queue.Empty):
                if self._waiting.get(timeout=OPEN_SECONDS) is None:
                    return
            self._take_over()
        while (item := self._waiting.get()) is not None:
            header, slot = item
            self._writing_since = self._clock()
            try:
                self._tier.write(*self._sealed(header, slot))
            except Exception:  # the blocks that wait behind this one can still be written
                _log.exception("a block could not be written")
                self._tier.declined(header.block_hash)
            self._writing_since = None
            self._free_slots.append(slot)
            self._written()
            if self._clock() > self._remember_at:
                self._remember_at = self._clock() + REMEMBER_SECONDS
                self._tier.remember()

    def _take_over(self) -> None:
        """The directories may be free by now."""
        try:
            self._tier.open()
        except CacheStoreBusyError:
            return
        except CacheStoreError as error:
            if str(error) != self._told:
                self._told = str(error)
                _log.warning("the SSD tier could not be taken over, and is tried again: %s", error)
            return
        _log.info("SSD tier: taken over, %d blocks found", self._tier.num_blocks)
        self._opened()

    def _sealed(self, header: RecordHeader, slot: memoryview) -> tuple[RecordHeader, memoryview]:
        """The finished record: compressed where that pays, with its checksum and its header."""
        payload = slot[HEADER_BYTES : HEADER_BYTES + header.raw_bytes]
        compressed = self._compression is not None and self._compression.pack(payload, self._block_seconds())
        stored = len(payload)
        if compressed:
            stored = len(compressed)
            payload[:stored] = compressed
        sealed = RecordHeader(
            header.block_hash,
            header.depth,
            header.raw_bytes,
            stored,
            body_checksum(slot[HEADER_BYTES : record_bytes(stored)]),
            bool(compressed),
        )
        sealed.pack_into(slot)
        return sealed, slot[: sealed.num_bytes]
