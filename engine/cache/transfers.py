"""Copies between the KV memory and the SSD, in threads. A copy never holds a step up; a hung disk costs its threads."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.api import READ_LATENCY_BOUNDS
from engine.cache.block import BlockHash
from engine.cache.compression import Compression
from engine.cache.cost import TransferCost
from engine.cache.disk_tier import DiskTier
from engine.cache.layer_stream import LayerStream
from engine.cache.load import Load, LoadRead
from engine.cache.readers import HUNG_SECONDS, Readers
from engine.cache.record import copy_block, record_bytes
from engine.cache.writes import WriteQueue
from engine.errors import BlockCorruptError

_log = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""How often a disk that lost against computing is asked again."""


class BlockMemory(Protocol):
    """Where the KV of all blocks lies, as bytes."""

    @property
    def bytes_per_block(self) -> int: ...

    def block_bytes(self, block_id: int) -> memoryview:
        """The bytes of one block, writable, without a copy."""


@dataclass(slots=True)
class TransferCounters:
    """Totals since the start; `latency_counts` are reads by `READ_LATENCY_BOUNDS`, the last one all the rest."""

    loads: int = 0
    late_loads: int = 0
    read_seconds: float = 0.0
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(READ_LATENCY_BOUNDS) + 1))


class Transfers:
    """`start`, `poll`, `abandon` and `write` are called by the engine's thread and never wait for the disk.

    A read goes into a buffer of its thread and from there, if its load still wants it, into the KV memory: so a load
    that is given up frees its blocks at once, and only the buffer waits for the disk. At most `num_readers` reads are
    in flight and `num_write_slots` blocks wait to be written; more are dropped.
    """

    def __init__(
        self,
        tier: DiskTier,
        memory: BlockMemory,
        cost: TransferCost,
        *,
        compression: Compression | None = None,
        num_write_slots: int = 64,
        has_deadline: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.memory = memory
        self.cost = cost
        self.counters = TransferCounters()
        self.on_landed: Callable[[], None] = lambda: None
        self._has_deadline = has_deadline
        self._clock = clock
        self._loads: list[Load] = []
        self.readers = Readers(cost.num_readers, record_bytes(memory.bytes_per_block), clock)
        self.layers = LayerStream(tier, self.readers, memory.bytes_per_block)
        self.tells_writes = False
        self._writes = WriteQueue(
            tier,
            memory.bytes_per_block,
            num_write_slots,
            compression=compression,
            block_seconds=lambda: cost.block_seconds,
            opened=self._opened,
            written=self._written,
            clock=clock,
        )
        self._lock = threading.Lock()
        self._last_read = clock()

    @property
    def is_hung(self) -> bool:
        """Whether a read is out for so long that no more should be asked for."""
        return self.readers.is_hung

    @property
    def is_write_hung(self) -> bool:
        """Whether a write is out for so long that nobody should wait for it."""
        return self._writes.is_hung

    @property
    def num_in_flight(self) -> int:
        """Blocks of loads that have not been read yet."""
        return sum(load.num_open for load in self._loads)

    @property
    def has_landed(self) -> bool:
        """Whether `poll` would give a load that did not run into its deadline."""
        return any(not load.num_open for load in self._loads)

    @property
    def next_deadline(self) -> float | None:
        return min((load.deadline for load in self._loads), default=None)

    @property
    def num_unwritten(self) -> int:
        return len(self._writes)

    @property
    def has_write_slot(self) -> bool:
        """Whether one more block may wait to be written."""
        return self._writes.has_room

    @property
    def num_dropped_writes(self) -> int:
        return self._writes.num_dropped

    def start(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> Load:
        """Begin to read blocks into the places of `block_ids`, which must stay reserved until `poll` gives the load."""
        allowed = self.cost.deadline_seconds(len(hashes), num_ahead=self.num_in_flight)
        deadline = self._clock() + allowed if self._has_deadline else float("inf")
        load = Load(hashes, block_ids, deadline, [False] * len(hashes), len(hashes))
        self._loads.append(load)
        self.counters.loads += 1
        for index, block_hash in enumerate(hashes):
            self.readers.put(LoadRead(self, block_hash, load, index))
        return load

    def poll(self) -> list[Load]:
        """Loads that are over: all of their blocks read, or their time up. Nothing is written to their blocks any
        more."""
        now, over = self._clock(), []
        for load in self._loads:
            if load.num_open and now >= load.deadline:
                self._give_up(load, now)
                self.counters.late_loads += 1
            if not load.num_open or load.abandoned:
                over.append(load)
        self._loads = [load for load in self._loads if load not in over]
        return over

    def abandon(self, load: Load) -> None:
        """End a load now; `poll` will not give it."""
        self._give_up(load, None)
        self._loads.remove(load)

    def write(self, block_hash: BlockHash, depth: int, block_id: int) -> bool:
        """Copy a block that the tier wants, to be written later; False, and declined, if too many wait already."""
        return self._writes.put(block_hash, depth, self.memory.block_bytes(block_id))

    def probe(self) -> None:
        """Read one block for its time alone, if none was read lately: a disk that was slow may be fast again."""
        if self.readers.reading() or self._clock() - self._last_read < PROBE_SECONDS:
            return
        block_hash = self.tier.index.newest()
        if block_hash is not None:
            self._last_read = self._clock()
            self.readers.put(LoadRead(self, block_hash, None, 0))

    def close(self) -> None:
        """Write what waits and end the threads; one that hangs in the disk is left behind."""
        for load in list(self._loads):
            self.abandon(load)
        self._writes.close(HUNG_SECONDS)
        self.readers.close()
        self.tier.close()

    def _opened(self) -> None:
        self.on_landed()  # as it is set by then

    def _written(self) -> None:
        if self.tells_writes:
            self.on_landed()

    def _give_up(self, load: Load, now: float | None) -> None:
        """After this nobody writes to the load's blocks: a reader that is copying holds the lock."""
        with load.lock:
            load.abandoned = True
        if now is not None:
            with self._lock:
                for read, since in self.readers.reading():
                    if isinstance(read, LoadRead) and read.load is load:
                        self.cost.observe_read(now - since)

    def take(self, read: LoadRead, buffer: memoryview, since: float) -> bool:
        """In a reader's thread: whether the block has come whole into the place where its load wants it."""
        got = self.tier.read(read.block_hash, buffer)
        if got is None:
            return False
        header, payload = got
        try:
            payload = Compression.unpack(payload, header.raw_bytes) if header.compressed else payload
        except BlockCorruptError as error:
            _log.warning("dropped a block of the SSD tier: %s", error)
            self.tier.drop_corrupt(read.block_hash)
            return False
        self._observe(self._clock() - since)
        load = read.load
        if load is None or len(payload) != self.memory.bytes_per_block:
            return False
        with load.lock:
            if load.abandoned:
                return False
            copy_block(self.memory.block_bytes(load.block_ids[read.index]), payload)
        return True

    def _observe(self, seconds: float) -> None:
        with self._lock:
            self.cost.observe_read(seconds)
            self.counters.read_seconds += seconds
            bucket = next(
                (i for i, bound in enumerate(READ_LATENCY_BOUNDS) if seconds <= bound), len(READ_LATENCY_BOUNDS)
            )
            self.counters.latency_counts[bucket] += 1
            self._last_read = self._clock()
