"""Copies between the KV memory and the SSD, in threads. A copy never holds a step up; a hung disk costs its threads."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.api import READ_LATENCY_BOUNDS
from engine.cache.block import BlockHash
from engine.cache.compression import Compression
from engine.cache.cost import TransferCost
from engine.cache.disk import aligned_buffer
from engine.cache.disk_tier import DiskTier
from engine.cache.record import record_bytes
from engine.cache.writes import WriteQueue
from engine.errors import BlockCorruptError

_log = logging.getLogger(__name__)

HUNG_SECONDS = 2.0
"""A read that takes longer switches loads off until it returns."""
PROBE_SECONDS = 5.0
"""How often a disk that lost against computing is asked again."""


class BlockMemory(Protocol):
    """Where the KV of all blocks lies, as bytes."""

    @property
    def bytes_per_block(self) -> int: ...

    def block_bytes(self, block_id: int) -> memoryview:
        """The bytes of one block, writable, without a copy."""


@dataclass(slots=True, eq=False)
class Load:
    """Blocks on their way from the SSD into the KV memory. `landed` says which of them came whole."""

    hashes: Sequence[BlockHash]
    block_ids: Sequence[int]
    deadline: float
    landed: list[bool] = field(default_factory=list)
    num_open: int = 0
    abandoned: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_landed(self) -> int:
        """Leading blocks that came: what follows a gap is of no use."""
        return self.landed.index(False) if False in self.landed else len(self.landed)


@dataclass(slots=True)
class TransferCounters:
    """Totals since the start; `latency_counts` are reads by `READ_LATENCY_BOUNDS`, the last one all the rest."""

    loads: int = 0
    late_loads: int = 0
    read_seconds: float = 0.0
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(READ_LATENCY_BOUNDS) + 1))


@dataclass(slots=True, eq=False)
class _Read:
    block_hash: BlockHash
    load: Load | None
    index: int
    since: float = 0.0


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
        self._reads: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._reading: dict[int, _Read] = {}
        self._writes = WriteQueue(
            tier,
            memory.bytes_per_block,
            num_write_slots,
            compression=compression,
            block_seconds=lambda: cost.block_seconds,
            opened=self._opened,
            clock=clock,
        )
        self._lock = threading.Lock()
        self._last_read = clock()
        self._threads = [
            threading.Thread(target=self._read_all, args=(number,), name=f"l3-read-{number}", daemon=True)
            for number in range(cost.num_readers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_hung(self) -> bool:
        """Whether a read is out for so long that no more should be asked for."""
        now = self._clock()
        return any(now - read.since > HUNG_SECONDS for read in list(self._reading.values()))

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
            self._reads.put(_Read(block_hash, load, index))
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
        if self._reading or self._clock() - self._last_read < PROBE_SECONDS:
            return
        block_hash = self.tier.newest()
        if block_hash is not None:
            self._last_read = self._clock()
            self._reads.put(_Read(block_hash, None, 0))

    def close(self) -> None:
        """Write what waits and end the threads; one that hangs in the disk is left behind."""
        for load in list(self._loads):
            self.abandon(load)
        self._writes.close(HUNG_SECONDS)
        for _ in range(self.cost.num_readers):
            self._reads.put(None)
        for thread in self._threads:
            thread.join(timeout=HUNG_SECONDS)
        self.tier.close()

    def _opened(self) -> None:
        self.on_landed()  # as it is set by then

    def _give_up(self, load: Load, now: float | None) -> None:
        """After this nobody writes to the load's blocks: a reader that is copying holds the lock."""
        with load.lock:
            load.abandoned = True
        if now is not None:
            with self._lock:
                for read in list(self._reading.values()):
                    if read.load is load:
                        self.cost.observe_read(now - read.since)

    def _read_all(self, number: int) -> None:
        buffer = aligned_buffer(record_bytes(self.memory.bytes_per_block))
        while (read := self._reads.get()) is not None:
            load = read.load
            if load is not None and load.abandoned:
                continue
            read.since = self._clock()
            self._reading[number] = read
            try:
                landed = self._read(read, buffer)
            except Exception:  # a thread that ends would leave its loads open for ever
                _log.exception("a block could not be read")
                landed = False
            del self._reading[number]
            if load is not None:
                with load.lock:
                    load.landed[read.index] = landed
                    load.num_open -= 1
                if not load.num_open:
                    self.on_landed()

    def _read(self, read: _Read, buffer: memoryview) -> bool:
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
        self._observe(self._clock() - read.since)
        load = read.load
        if load is None or len(payload) != self.memory.bytes_per_block:
            return False
        with load.lock:
            if load.abandoned:
                return False
            self.memory.block_bytes(load.block_ids[read.index])[:] = payload
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
