"""Parts of blocks from the SSD: right, whole where they have to be, and never from a damaged block."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cache.compression import Compression
from engine.cache.cost import TransferCost
from engine.cache.disk import ALIGNMENT
from engine.cache.disk_tier import DiskTier
from engine.cache.layer_stream import LayerStream, Part
from engine.cache.readers import HUNG_SECONDS
from engine.cache.record import record_bytes
from engine.cache.segments import SegmentStore
from engine.cache.transfers import Transfers
from engine.errors import ColdReadError

SIZE = 3 * ALIGNMENT + 100
PARTS = (Part(0, 5_000), Part(5_000, 9_000), Part(9_000, SIZE))
NAMES = [character * 32 for character in (b"a", b"b", b"c")]


class Memory:
    bytes_per_block = SIZE

    def __init__(self) -> None:
        self.block = bytearray(SIZE)

    def block_bytes(self, block_id: int) -> memoryview:
        return memoryview(self.block)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def content(name: bytes) -> bytes:
    return bytes((name[0] + index // 100) % 251 for index in range(SIZE))


class Rig:
    """Three blocks on a disk in memory; `sizes` are those of all reads since."""

    def __init__(self, directory: Path, disk: Any, compression: Compression | None = None) -> None:
        self.disk, self.clock, memory = disk, Clock(), Memory()
        tier = DiskTier([SegmentStore(directory, 64 * record_bytes(SIZE), 8 * record_bytes(SIZE), disk)])
        tier.open()
        cost = TransferCost(num_readers=2, block_seconds=1.0)
        self.transfers = Transfers(tier, memory, cost, compression=compression, clock=self.clock)
        for name in NAMES:
            memory.block[:] = content(name)
            assert tier.wants(name, at_once=True) and self.transfers.write(name, 0, 0)
        waited = threading.Event()
        while self.transfers.num_unwritten:
            waited.wait(0.001)
        self.sizes: list[int] = []
        disk.on_read = lambda data: self.sizes.append(len(data))

    @property
    def stream(self) -> LayerStream:
        return self.transfers.layers

    def part(self, number: int) -> list[bytes]:
        part = PARTS[number]
        places = [bytearray(part.end - part.start) for _ in NAMES]
        self.stream.wait(self.stream.fetch(NAMES, PARTS, number, lambda index: memoryview(places[index])))
        return [bytes(place) for place in places]


@pytest.fixture
def rig(tmp_path: Path, disk: Any) -> Iterator[Rig]:
    made = Rig(tmp_path, disk)
    yield made
    made.transfers.close()


def right(number: int) -> list[bytes]:
    return [content(name)[PARTS[number].start : PARTS[number].end] for name in NAMES]


def test_every_part_is_right_and_only_the_first_read_of_a_block_is_whole(rig: Rig) -> None:
    """Later ones are of the whole pages around the part, however it lies in them."""
    assert rig.part(1) == right(1)
    assert rig.sizes == [record_bytes(SIZE)] * 3
    rig.sizes.clear()
    assert [rig.part(number) for number in range(3)] == [right(number) for number in range(3)]
    assert sorted(rig.sizes) == [2 * ALIGNMENT] * 9
    assert rig.stream.num_bytes == 3 * (SIZE + 4_000)


def test_a_damaged_part_is_never_given(rig: Rig) -> None:
    """The whole block is read again; where it is damaged too it is lost, and its name is told."""
    rig.part(0)

    def damage(data: memoryview) -> None:
        if data[-1] == 0 or len(data) == 2 * ALIGNMENT:
            data[len(data) // 2] ^= 1

    rig.disk.on_read = damage
    with pytest.raises(ColdReadError, match="could not be read back"):
        rig.part(0)
    assert rig.transfers.tier.counters.corrupt == 3


def test_a_part_that_is_damaged_once_is_taken_from_the_whole_block(rig: Rig) -> None:
    """What a cable did to one read costs another one."""
    rig.part(0)
    rig.disk.on_read = lambda data: data.__setitem__(7, data[7] ^ (len(data) == 2 * ALIGNMENT))
    assert rig.part(0) == right(0)
    assert rig.transfers.tier.counters.corrupt == 0


def test_compressed_blocks_are_read_whole_and_unpacked(tmp_path: Path, disk: Any) -> None:
    """Whatever was written by a worker with other settings."""
    compression = Compression()
    compression.sampled, compression.stored_share = 100, 0.1
    made = Rig(tmp_path, disk, compression)
    assert [made.part(number) for number in (0, 2)] == [right(0), right(2)]
    assert all(size < record_bytes(SIZE) for size in made.sizes) and len(made.sizes) == 6
    made.transfers.close()


def test_a_disk_that_hangs_is_not_waited_for(rig: Rig) -> None:
    """Whoever waits hears of it, and a read that returns later writes nowhere."""
    opened, begun = threading.Event(), threading.Event()

    def hang(data: memoryview) -> None:
        begun.set()
        opened.wait(10)

    rig.disk.on_read = hang
    places = [bytearray(5_000) for _ in NAMES]
    load = rig.stream.fetch(NAMES, PARTS, 0, lambda index: memoryview(places[index]))
    assert begun.wait(10)
    rig.clock.now += HUNG_SECONDS + 1
    with pytest.raises(ColdReadError, match="does not answer") as raised:
        rig.stream.wait(load)
    assert raised.value.is_hung
    opened.set()
    rig.transfers.close()
    assert places == [bytearray(5_000)] * 3
