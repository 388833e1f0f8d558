"""An SSD without a disk: the real tier's index, admission and eviction over segments that only count."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from engine.cache.block import BlockHash
from engine.cache.cold_admission import ColdAdmission
from engine.cache.cost import TransferCost
from engine.cache.disk_tier import DiskTier
from engine.cache.load import Load
from engine.cache.record import RecordHeader
from engine.cache.segments import Place, SegmentStore
from engine.cache.transfers import TransferCounters
from engine.errors import CacheStoreFullError

ONE_BLOCK = memoryview(b"\0")  # a record counts one, so the capacity is in blocks


@dataclass(slots=True)
class VirtualStore:
    """A `SegmentStore` of `capacity_bytes` records that keeps none of them."""

    capacity_bytes: int
    segment_bytes: int
    directory: Path = Path("virtual")
    _used: dict[int, int] = field(default_factory=dict)
    _last: int = -1

    @property
    def file_bytes(self) -> int:
        return sum(self._used.values())

    @property
    def sealed(self) -> list[int]:
        return [number for number in self._used if number != self._last]

    def used_bytes(self, number: int) -> int:
        return self._used[number]

    def append(self, record: memoryview) -> Place:
        if self._last < 0 or self._used[self._last] >= self.segment_bytes:
            if (len(self._used) + 1) * self.segment_bytes > self.capacity_bytes:
                raise CacheStoreFullError
            self._last += 1
            self._used[self._last] = 0
        place = Place(self._last, self._used[self._last], 1)
        self._used[self._last] += 1
        return place

    def read(self, place: Place, block_hash: BlockHash, buffer: memoryview) -> tuple[RecordHeader, memoryview]:
        return RecordHeader(block_hash, 0, 1, 1, 0), buffer

    def remove(self, number: int) -> None:
        del self._used[number]


@dataclass(slots=True)
class VirtualTransfers:
    """The part of `Transfers` that a `ColdTier` asks for. Blocks come one after the other, each in `block_seconds`."""

    tier: DiskTier
    cost: TransferCost
    now: float = 0.0
    is_hung: bool = False
    counters: TransferCounters = field(default_factory=TransferCounters)
    _loads: list[Load] = field(default_factory=list)
    _free_at: float = 0.0

    @property
    def num_in_flight(self) -> int:
        return sum(len(load.hashes) for load in self._loads)

    @property
    def next_landing(self) -> float | None:
        return min((load.deadline for load in self._loads), default=None)

    def start(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> Load:
        self._free_at = max(self.now, self._free_at) + len(hashes) * self.cost.block_seconds
        load = Load(hashes, block_ids, self._free_at, [True] * len(hashes))
        self._loads.append(load)
        self.counters.loads += 1
        return load

    def poll(self) -> list[Load]:
        landed = [load for load in self._loads if load.deadline <= self.now]
        self._loads = [load for load in self._loads if load.deadline > self.now]
        return landed

    def abandon(self, load: Load) -> None:
        self._loads = [other for other in self._loads if other is not load]

    def write(self, block_hash: BlockHash, depth: int, block_id: int) -> bool:
        return self.tier.write(RecordHeader(block_hash, depth, 1, 1, 0), ONE_BLOCK)

    def probe(self) -> None:
        pass

    def close(self) -> None:
        pass


def virtual_ssd(
    num_blocks: int, *, admission: ColdAdmission, block_seconds: float, token_seconds: float
) -> VirtualTransfers:
    """An SSD of so many blocks, in segments of a 64th."""
    store = cast(SegmentStore, VirtualStore(num_blocks, max(1, num_blocks // 64)))
    cost = TransferCost(block_seconds=block_seconds, token_seconds=token_seconds)
    return VirtualTransfers(DiskTier([store], admission=admission, is_open=True), cost)
