"""Copies that land, that are late, that are given up, and a disk that hangs."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cache.compression import NUM_SAMPLES, Compression
from engine.cache.cost import TransferCost
from engine.cache.disk_tier import DiskTier
from engine.cache.load import Load
from engine.cache.readers import HUNG_SECONDS
from engine.cache.record import record_bytes
from engine.cache.segments import SegmentStore
from engine.cache.transfers import PROBE_SECONDS, Transfers

SIZE = 4096
WAIT = 10.0


class Memory:
    bytes_per_block = SIZE

    def __init__(self, num_blocks: int = 16) -> None:
        self.data = bytearray(num_blocks * SIZE)

    def block_bytes(self, block_id: int) -> memoryview:
        return memoryview(self.data)[block_id * SIZE : (block_id + 1) * SIZE]

    def fill(self, block_id: int, value: int) -> None:
        self.block_bytes(block_id)[:] = bytes([value]) * SIZE


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """Transfers over a disk in memory; `landed` is set whenever a load is over."""

    def __init__(self, directory: Path, disk: Any, **options: Any) -> None:
        self.clock, self.memory, self.disk = Clock(), Memory(), disk
        self.cost = TransferCost(num_readers=2, block_seconds=0.001)
        tier = DiskTier([SegmentStore(directory, 64 * record_bytes(SIZE), 8 * record_bytes(SIZE), disk)])
        tier.open()
        self.transfers = Transfers(tier, self.memory, self.cost, clock=self.clock, **options)
        self.landed = threading.Semaphore(0)
        self.transfers.on_landed = self.landed.release

    def store(self, *names: bytes) -> None:
        """Blocks whose bytes are those of their name."""
        for name in names:
            self.memory.fill(0, name[0])
            assert self.transfers.tier.wants(name, at_once=True)
            assert self.transfers.write(name, 0, 0)
        self.written()

    def written(self) -> None:
        reached = threading.Event()
        self.disk.on_read = lambda data: None
        for _ in range(int(WAIT * 1000)):
            if not self.transfers.num_unwritten:
                return
            reached.wait(0.001)
        raise AssertionError("blocks were not written")

    def first(self, block_id: int) -> int:
        return self.memory.block_bytes(block_id)[0]


@pytest.fixture
def rig(tmp_path: Path, disk: Any) -> Iterator[Rig]:
    made = Rig(tmp_path, disk)
    yield made
    made.transfers.close()


def names(text: str) -> list[bytes]:
    return [character.encode() * 32 for character in text]


def test_a_load_brings_each_block_to_its_place(rig: Rig) -> None:
    """What was written comes back, byte for byte, and `poll` gives the load once."""
    rig.store(*names("abc"))
    load = rig.transfers.start(names("cab"), [5, 6, 7])
    assert rig.landed.acquire(timeout=WAIT)
    assert rig.transfers.poll() == [load] and rig.transfers.poll() == []
    assert load.num_landed == 3
    assert [bytes(rig.memory.block_bytes(i)) for i in (5, 6, 7)] == [c.encode() * SIZE for c in "cab"]


def test_what_follows_a_missing_block_is_of_no_use(rig: Rig) -> None:
    """The blocks before it count as landed."""
    rig.store(*names("ac"))
    load = rig.transfers.start(names("abc"), [5, 6, 7])
    assert rig.landed.acquire(timeout=WAIT)
    assert (load.num_landed, load.landed) == (1, [True, False, True])


@pytest.fixture
def gate(rig: Rig) -> Iterator[threading.Event]:
    """Reads wait until it is set. `rig.started` is released when one begins to wait."""
    rig.store(*names("abc"))
    opened = threading.Event()
    rig.started = threading.Semaphore(0)  # type: ignore[attr-defined]

    def wait(data: memoryview) -> None:
        rig.started.release()  # type: ignore[attr-defined]
        assert opened.wait(WAIT)

    rig.disk.on_read = wait
    yield opened
    opened.set()


def begin(rig: Rig, num_waiting: int = 1) -> Load:
    load = rig.transfers.start(names("ab"), [5, 6])
    for _ in range(num_waiting):
        assert rig.started.acquire(timeout=WAIT)  # type: ignore[attr-defined]
    return load


def test_a_late_load_is_a_miss_a_sample_for_the_gate_and_never_writes_again(rig: Rig, gate: threading.Event) -> None:
    """At the deadline its blocks are free: whatever the disk gives later does not reach them. The blocks stay."""
    load = begin(rig, 2)
    assert rig.transfers.poll() == []
    rig.clock.now += 0.016
    assert rig.transfers.poll() == [load] and load.num_landed == 0
    assert rig.cost.block_seconds > 0.005 and rig.transfers.counters.late_loads == 1
    assert names("a")[0] in rig.transfers.tier
    gate.set()
    rig.transfers.close()
    assert (rig.first(5), rig.first(6)) == (0, 0)


def test_the_deadline_follows_the_prediction(rig: Rig, gate: threading.Event) -> None:
    """Three times what is predicted, but not less than 15 ms."""
    rig.cost.block_seconds = 0.1
    load = begin(rig, 2)
    rig.clock.now += 0.25
    assert rig.transfers.poll() == []
    rig.clock.now += 0.1
    assert rig.transfers.poll() == [load]


def test_an_abandoned_load_frees_its_blocks_at_once(rig: Rig, gate: threading.Event) -> None:
    """Reads that have not begun are skipped, those under way write nothing, and `poll` does not give it."""
    load = begin(rig, 2)
    rig.transfers.abandon(load)
    gate.set()
    assert rig.transfers.poll() == [] and rig.transfers.num_in_flight == 0
    rig.transfers.close()
    assert (rig.first(5), rig.first(6)) == (0, 0)


def test_a_hung_disk_holds_its_threads_and_nothing_else(rig: Rig, gate: threading.Event) -> None:
    """It is noticed, further loads are late and free their blocks, and it is over when the reads return."""
    begin(rig, 2)
    rig.clock.now += HUNG_SECONDS + 0.1
    assert rig.transfers.is_hung
    assert len(rig.transfers.poll()) == 1
    second = rig.transfers.start(names("c"), [7])
    rig.clock.now += 10
    assert rig.transfers.poll() == [second]
    gate.set()
    rig.transfers.close()
    assert not rig.transfers.is_hung


def test_blocks_that_wait_to_be_written_are_bounded(tmp_path: Path, disk: Any) -> None:
    """The next one is dropped and may be asked for again; nobody waits for the disk."""
    opened, started = threading.Event(), threading.Event()

    def wait(data: memoryview) -> None:
        started.set()
        assert opened.wait(WAIT)

    disk.on_write = wait
    rig = Rig(tmp_path, disk, num_write_slots=2)
    tier = rig.transfers.tier
    for name in names("ab"):
        assert tier.wants(name, at_once=True) and rig.transfers.write(name, 0, 0)
    assert started.wait(WAIT)
    (name,) = names("c")
    assert tier.wants(name, at_once=True) and not rig.transfers.write(name, 0, 0)
    assert rig.transfers.num_dropped_writes == 1
    assert tier.wants(name, at_once=True)
    opened.set()
    rig.transfers.close()


class Broken(Compression):
    """Packs nothing at all."""

    def pack(self, payload: memoryview, read_seconds: float) -> bytes | None:
        raise RuntimeError("made to fail")


def test_a_block_that_could_not_be_sealed_may_be_asked_for_again(tmp_path: Path, disk: Any) -> None:
    """It is no longer on its way: who waits for it to come would wait for ever."""
    rig = Rig(tmp_path, disk, compression=Broken())
    rig.store(*names("a"))
    assert rig.transfers.tier.wants(names("a")[0], at_once=True)
    rig.transfers.close()


def test_a_directory_that_another_process_leaves_is_taken_over(tmp_path: Path, disk: Any) -> None:
    """Until then the tier is empty and wants nothing; then it has what the other one wrote."""
    first = Rig(tmp_path, disk)
    first.store(*names("a"))
    tier = DiskTier([SegmentStore(tmp_path, 64 * record_bytes(SIZE), 8 * record_bytes(SIZE), disk)])
    second = Transfers(tier, Memory(), TransferCost(num_readers=1))
    taken = threading.Event()
    second.on_landed = taken.set
    assert not tier.wants(names("b")[0], at_once=True)
    first.transfers.close()
    assert taken.wait(WAIT)
    assert names("a")[0] in tier
    second.close()


def test_a_disk_that_lost_against_computing_is_asked_again(rig: Rig) -> None:
    """After five seconds without a read, one block is read for its time alone."""
    rig.store(*names("a"))
    rig.cost.block_seconds = 9.0
    read = threading.Event()
    rig.disk.on_read = lambda data: read.set()
    rig.transfers.probe()
    assert not read.is_set()
    rig.clock.now += PROBE_SECONDS
    rig.transfers.probe()
    assert read.wait(WAIT)
    rig.transfers.close()
    assert rig.cost.block_seconds < 9.0


def test_loading_is_chosen_only_while_it_is_measured_to_be_faster() -> None:
    """Blocks ahead count, a slow read tells at once, many fast ones bring it back; without measurements computing."""
    cost = TransferCost(num_readers=2)
    cost.observe_read(0.001)
    assert not cost.is_cheaper(10, 160)
    cost.observe_prefill(100, 0.1)
    assert cost.is_cheaper(10, 160)
    assert not cost.is_cheaper(10, 160, num_ahead=400)
    cost.observe_read(0.07)
    assert not cost.is_cheaper(10, 160)
    for _ in range(20):
        cost.observe_read(0.001)
    assert cost.is_cheaper(10, 160)


def test_blocks_are_packed_only_where_that_makes_them_come_sooner(tmp_path: Path, disk: Any) -> None:
    """Zeros on a slow disk are, noise on any disk is not; what was packed comes back as it was."""
    slow, fast = Compression(), Compression()
    zeros = memoryview(bytes(1 << 16))
    for _ in range(NUM_SAMPLES):
        assert slow.pack(zeros, 1.0) is None and fast.pack(zeros, 1e-9) is None
    assert slow.pack(zeros, 1.0) is not None and fast.pack(zeros, 1e-9) is None
    rig = Rig(tmp_path, disk, compression=slow)
    rig.cost.block_seconds = 1.0
    rig.store(*names("a"))
    assert rig.transfers.tier.counters.bytes_written < record_bytes(SIZE) + 1
    rig.transfers.start(names("a"), [5])
    assert rig.landed.acquire(timeout=WAIT)
    assert bytes(rig.memory.block_bytes(5)) == b"a" * SIZE
    rig.transfers.close()


class Rubbish(Compression):
    """Packs a block into what is no zstd frame."""

    def pack(self, payload: memoryview, read_seconds: float) -> bytes | None:
        return b"rubbish"


def test_a_block_that_cannot_be_unpacked_is_dropped_for_good(tmp_path: Path, disk: Any) -> None:
    """It is a miss, counted as damaged, and not looked up again."""
    rig = Rig(tmp_path, disk, compression=Rubbish())
    rig.store(*names("a"))
    rig.transfers.start(names("a"), [5])
    assert rig.landed.acquire(timeout=WAIT)
    assert rig.transfers.poll()[0].num_landed == 0
    assert (rig.transfers.tier.counters.corrupt, rig.transfers.tier.num_blocks) == (1, 0)
    rig.transfers.close()
