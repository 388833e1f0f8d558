"""What the SSD tier keeps, gives up and never gives back wrong."""

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.cache.cold_admission import ColdAdmission
from engine.cache.disk import aligned_buffer
from engine.cache.disk_tier import REST_SECONDS, DiskTier
from engine.cache.record import HEADER_BYTES, RecordHeader, record_bytes
from engine.cache.segments import SegmentStore

Record = Callable[..., tuple[RecordHeader, memoryview]]
SIZE = record_bytes(64)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def open_tier(directory: Path, disk: Any, *, num_blocks: int = 40, num_stores: int = 1, **options: Any) -> DiskTier:
    stores = [SegmentStore(directory / str(i), num_blocks * SIZE, 5 * SIZE, disk) for i in range(num_stores)]
    tier = DiskTier(stores, **options)
    tier.open()
    return tier


def put(tier: DiskTier, made: tuple[RecordHeader, memoryview]) -> bool:
    return tier.wants(made[0].block_hash, at_once=True) and tier.write(*made)


def get(tier: DiskTier, block_hash: bytes) -> bytes | None:
    found = tier.read(block_hash, aligned_buffer(SIZE))
    return None if found is None else bytes(found[1])


def test_a_block_is_wanted_when_it_is_seen_for_the_second_time(tmp_path: Path, disk: Any, record: Record) -> None:
    """Once on its way or stored it is not wanted again; a preempted request's block is wanted at once."""
    tier = open_tier(tmp_path, disk, admission=ColdAdmission.SECOND)
    header, page = record("a")
    assert [tier.wants(header.block_hash) for _ in range(3)] == [False, True, False]
    assert tier.write(header, page) and header.block_hash in tier
    assert not tier.wants(header.block_hash, at_once=True)
    assert tier.wants(record("b")[0].block_hash, at_once=True)
    tier.declined(record("b")[0].block_hash)
    assert tier.wants(record("b")[0].block_hash, at_once=True)


def test_room_is_filled_at_once_and_what_comes_after_waits_for_its_second_touch(
    tmp_path: Path, disk: Any, record: Record
) -> None:
    """Up to half of the space every block is wanted when it is first seen, beyond at the second time: what is written
    for a stream that never repeats is bounded by half of the space, also over a restart and once the tier was full."""
    tier = open_tier(tmp_path, disk, num_blocks=40)
    for number in range(200):
        header, page = record(number)
        if tier.wants(header.block_hash):
            tier.write(header, page)
    assert tier.num_blocks == tier.counters.blocks_written == 21
    tier.close()
    tier = open_tier(tmp_path, disk, num_blocks=40)
    header, page = record("new")
    assert [tier.wants(header.block_hash) for _ in range(2)] == [False, True]
    assert tier.write(header, page)
    for number in range(1000, 1100):
        put(tier, record(number))
    assert tier.counters.evictions and not tier.wants(record("after")[0].block_hash)


def test_first_touch_takes_every_block_however_full_the_tier_is(tmp_path: Path, disk: Any, record: Record) -> None:
    """The setting for a disk whose wear does not matter."""
    tier = open_tier(tmp_path, disk, num_blocks=20, admission=ColdAdmission.FIRST)
    for number in range(50):
        header, page = record(number)
        assert tier.wants(header.block_hash) and tier.write(header, page)


def test_a_full_tier_gives_up_what_was_used_longest_ago_and_writes_little_twice(
    tmp_path: Path, disk: Any, record: Record
) -> None:
    """Never larger than its bound; 20 blocks that are asked for all the time are found nearly always, and what is
    written again for them stays below 1.3 times what came."""
    tier = open_tier(tmp_path, disk, num_blocks=100)
    hot = [record(f"hot{i}") for i in range(20)]
    rng, found = random.Random(1), 0
    for number in range(2000):
        put(tier, record(number))
        asked = rng.choice(hot)
        if get(tier, asked[0].block_hash) is not None:
            found += 1
            tier.index.touch([asked[0].block_hash])
        else:
            put(tier, asked)
        tier.check()
    assert found > 1800
    assert tier.counters.evictions > 1500
    assert 1.0 < tier.counters.write_amplification <= 1.3


def test_a_prefix_outlives_what_follows_it(tmp_path: Path, disk: Any, record: Record) -> None:
    """Of a chain that was touched, the leaf is older than its parent."""
    tier = open_tier(tmp_path, disk)
    chain = [record(i) for i in range(3)]
    for made in chain:
        put(tier, made)
    tier.index.touch([header.block_hash for header, _ in chain])
    assert tier.index.newest() == chain[0][0].block_hash


def damage(disk: Any, at: int) -> None:
    (content,) = [file for path, file in disk.contents.items() if path.suffix == ".seg"]
    content[at] ^= 1


@pytest.mark.parametrize("at", [0, 60, HEADER_BYTES, HEADER_BYTES + 63])
def test_a_damaged_block_is_dropped_for_good(at: int, tmp_path: Path, disk: Any, record: Record) -> None:
    """One flipped bit, wherever it is: a miss, counted once, never looked up again, nor by the next process."""
    tier = open_tier(tmp_path, disk)
    first, second = record("first"), record("second")
    put(tier, first)
    put(tier, second)
    damage(disk, at)
    assert get(tier, first[0].block_hash) is None
    assert first[0].block_hash not in tier and tier.counters.corrupt == 1
    assert get(tier, second[0].block_hash) == second[0].block_hash * 2
    tier.close()
    tier = open_tier(tmp_path, disk)
    assert first[0].block_hash not in tier and second[0].block_hash in tier


def test_blocks_of_a_file_that_was_cut_or_cannot_be_read_are_dropped(tmp_path: Path, disk: Any, record: Record) -> None:
    """A truncated file is damage; an error of the disk makes the block missing. Both are misses, told apart."""
    tier = open_tier(tmp_path, disk)
    first, second = record("first"), record("second")
    put(tier, first)
    put(tier, second)
    for content in disk.contents.values():
        del content[SIZE + 100 :]
    assert get(tier, second[0].block_hash) is None and tier.counters.corrupt == 1

    def fail(data: memoryview) -> None:
        raise OSError(errno.EIO, "Input/output error")

    disk.on_read = fail
    assert get(tier, first[0].block_hash) is None
    assert (tier.counters.corrupt, tier.counters.missing, tier.num_blocks) == (1, 1, 0)


def test_a_disk_that_others_fill_costs_old_blocks_and_then_writes_rest(
    tmp_path: Path, disk: Any, record: Record, clock: Clock
) -> None:
    """Without a byte left one of our segments gives way; without even that the directory rests for a minute."""
    tier = open_tier(tmp_path, disk, clock=clock)
    for number in range(10):
        assert put(tier, record(number))
    disk.free = 0
    assert put(tier, record("a")) and tier.counters.evictions == 5
    disk.free = -(10 * SIZE)
    for number in range(20, 24):
        assert put(tier, record(number))
    assert not put(tier, record("none")) and tier.counters.write_errors == 1
    disk.free = 1 << 40
    assert not put(tier, record("still none")) and tier.counters.write_errors == 1
    clock.now += REST_SECONDS + 1
    assert put(tier, record("again"))


def test_a_directory_that_became_read_only_gives_what_it_has_and_takes_nothing(
    tmp_path: Path, disk: Any, record: Record
) -> None:
    """Nothing is removed for a write that cannot succeed; another directory takes the blocks."""
    tier = open_tier(tmp_path, disk, num_stores=2)
    stored = [record(number) for number in range(20)]
    for made in stored:
        assert put(tier, made)

    def refuse(data: memoryview) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    disk.on_write = refuse
    assert not put(tier, record("new"))
    assert all(get(tier, header.block_hash) == header.block_hash * 2 for header, _ in stored)


def test_the_most_used_blocks_are_known_after_a_restart(tmp_path: Path, disk: Any, record: Record) -> None:
    """How often each was used survives, a prefix before what follows it; an unreadable history costs only that."""
    tier = open_tier(tmp_path, disk)
    for number in range(5):
        put(tier, record(number, number))
    tier.index.touch([record(number)[0].block_hash for number in range(3)])
    tier.index.touch([record(number)[0].block_hash for number in range(2)])
    tier.close()
    tier = open_tier(tmp_path, disk)
    assert tier.index.hottest(10) == [record(number)[0].block_hash for number in range(3)]
    assert tier.index.hottest(2) == [record(number)[0].block_hash for number in range(2)]
    tier.close()
    (tmp_path / "0" / "history.json").write_text("{")
    tier = open_tier(tmp_path, disk)
    assert tier.num_blocks == 5 and tier.index.hottest(10) == []


def test_pinned_blocks_stay_where_others_go(tmp_path: Path, disk: Any, record: Record) -> None:
    """Also where each of their segments has others as well: they are moved together, and are found all the while."""
    tier = open_tier(tmp_path, disk)
    pinned = [record(f"p{number}") for number in range(tier.max_pinned(64))]
    others = [record(f"o{number}") for number in range(300)]
    left = iter(others)
    for made in pinned:
        tier.index.pin(made[0].block_hash)
        assert put(tier, made) and put(tier, next(left))
    for made in left:
        tier.index.touch([made[0].block_hash])
        put(tier, made)
        assert all(header.block_hash in tier for header, _ in pinned)
        tier.check()
    assert all(get(tier, header.block_hash) == header.block_hash * 2 for header, _ in pinned)
    tier.index.unpin(header.block_hash for header, _ in pinned)
    for number in range(100):
        assert put(tier, record(f"later{number}"))
    assert not any(header.block_hash in tier for header, _ in pinned)


def test_a_short_segment_of_pinned_blocks_does_not_keep_the_others_from_going(
    tmp_path: Path, disk: Any, record: Record
) -> None:
    """One that an earlier process began has few blocks; that all of them are pinned says nothing of the rest."""
    tier = open_tier(tmp_path, disk)
    short = record("short")
    assert put(tier, short)
    tier.close()
    tier = open_tier(tmp_path, disk)
    made = [record(number) for number in range(100)]
    pinned = [short, *(made[number] for number in range(35) if number % 5 < 2)]  # two of five in every other segment
    for header, _ in pinned:
        tier.index.pin(header.block_hash)
    assert all(put(tier, one) for one in made[:35])
    assert all(put(tier, one) for one in made[35:])
    assert all(header.block_hash in tier for header, _ in pinned)
    tier.check()


def test_a_pinned_block_is_not_given_up_where_its_segment_gave_too_little_room(
    tmp_path: Path, disk: Any, record: Record
) -> None:
    """A segment that was cut short by a restart gives less than a new one takes: another one goes as well."""
    tier = open_tier(tmp_path, disk, num_blocks=38)
    short = [record("s0"), record("s1")]
    assert all(put(tier, one) for one in short)
    tier.close()
    tier = open_tier(tmp_path, disk, num_blocks=38)
    made = [record(number) for number in range(60)]
    pinned = [short[0], *(made[number] for number in range(35) if number % 5 < 2)]
    for header, _ in pinned:
        tier.index.pin(header.block_hash)
    assert all(put(tier, one) for one in made)
    assert all(get(tier, header.block_hash) == header.block_hash * 2 for header, _ in pinned)
    tier.check()


def test_a_pinned_block_can_be_read_while_it_is_moved(tmp_path: Path, disk: Any, record: Record) -> None:
    """Between the end of its segment and its new place it comes from memory."""
    tier = open_tier(tmp_path, disk)
    made = [record(number) for number in range(40)]
    for number, one in enumerate(made):
        if number % 5 == 0:  # one in every segment
            tier.index.pin(one[0].block_hash)
        assert put(tier, one)
    seen: list[bytes | None] = []

    def look(data: memoryview) -> None:
        if bytes(data[:HEADER_BYTES]) == bytes(made[0][1][:HEADER_BYTES]):  # it is appended again
            seen.append(get(tier, made[0][0].block_hash))

    disk.on_write = look
    assert put(tier, record("more"))
    assert seen == [made[0][0].block_hash * 2] and get(tier, made[0][0].block_hash) == seen[0]


def test_a_tier_full_of_pinned_blocks_takes_no_more_and_goes_on_later(
    tmp_path: Path, disk: Any, record: Record, clock: Clock
) -> None:
    """It is not the directory that failed, so it does not rest."""
    tier = open_tier(tmp_path, disk, clock=clock)
    pinned = [record(f"p{number}") for number in range(40)]
    for made in pinned:
        tier.index.pin(made[0].block_hash)
        assert put(tier, made)
    assert not put(tier, record("more"))
    tier.index.unpin(header.block_hash for header, _ in pinned)
    assert put(tier, record("more"))
