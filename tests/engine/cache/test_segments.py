"""What is in the files is found again, and nothing that was not written whole."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cache.disk import Disk, aligned_buffer
from engine.cache.record import RecordHeader, record_bytes
from engine.cache.segments import Place, SegmentStore
from engine.errors import BlockCorruptError, CacheStoreBusyError, CacheStoreError, CacheStoreFullError

Record = Callable[..., tuple[RecordHeader, memoryview]]
SIZE = record_bytes(64)


def open_store(directory: Path, *, capacity: int = 16 * SIZE) -> SegmentStore:
    store = SegmentStore(directory, capacity, 4 * SIZE)
    store.open()
    return store


def fill(store: SegmentStore, record: Record, names: range) -> list[tuple[RecordHeader, Place]]:
    records = [record(name, depth) for depth, name in enumerate(names)]
    return [(header, store.append(page)) for header, page in records]


def test_a_new_process_finds_every_record_in_order(tmp_path: Path, record: Record) -> None:
    """Headers alone rebuild the index, with the depth of each block; every payload is what was written."""
    store = open_store(tmp_path)
    written = fill(store, record, range(10))
    store.close()
    store = SegmentStore(tmp_path, 16 * SIZE, 4 * SIZE)
    assert store.open() == written
    buffer = aligned_buffer(SIZE)
    for header, place in written:
        assert bytes(store.read(place, header.block_hash, buffer)[1]) == header.block_hash * 2
    store.close()


@pytest.mark.parametrize("cut", [1, 4095, 4096, SIZE - 1])
def test_what_was_being_written_is_cut_off(cut: int, tmp_path: Path, record: Record) -> None:
    """A file that ends within its last record, or holds only a part of it, has one record less and no other loss."""
    store = open_store(tmp_path)
    written = fill(store, record, range(3))
    store.close()
    (file,) = tmp_path.glob("*.seg")
    os.truncate(file, 2 * SIZE + cut)
    os.truncate(file, 4 * SIZE)  # what is not written of an allocated file reads as zeros
    store = SegmentStore(tmp_path, 16 * SIZE, 4 * SIZE)
    assert store.open() == written[: 3 if cut > 4096 + 64 else 2]
    store.close()


def test_a_damaged_header_hides_its_own_record_alone(tmp_path: Path, record: Record) -> None:
    """The scan finds the next header behind it."""
    store = open_store(tmp_path)
    written = fill(store, record, range(3))
    store.close()
    (file,) = tmp_path.glob("*.seg")
    with file.open("r+b") as content:
        content.seek(SIZE)
        content.write(b"damage")
    store = SegmentStore(tmp_path, 16 * SIZE, 4 * SIZE)
    assert store.open() == [written[0], written[2]]
    store.close()


WRITER = """
import sys
from pathlib import Path
from engine.cache.segments import SegmentStore
from engine.cache.disk import aligned_buffer
from engine.cache.record import HEADER_BYTES, RecordHeader, body_checksum, record_bytes
payload = 256 << 10
size = record_bytes(payload)
store = SegmentStore(Path(sys.argv[1]), 64 * size, 4 * size)
store.open()
for number in range(60):
    name = number.to_bytes(32, "big")
    record = aligned_buffer(size)
    record[HEADER_BYTES:] = name * (payload // 32)
    header = RecordHeader(name, number, payload, payload, body_checksum(record[HEADER_BYTES:]))
    header.pack_into(record)
    store.append(record)
    print(number, flush=True)
"""


def test_after_a_kill_in_the_middle_of_writing_every_found_block_is_whole(tmp_path: Path) -> None:
    """All blocks that were told of are there, and whatever else is found reads back right."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = [int(process.stdout.readline()) for _ in range(10)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    size = record_bytes(256 << 10)
    store = SegmentStore(tmp_path, 64 * size, 4 * size)
    found = store.open()
    assert [header.depth for header, _ in found[: len(told)]] == told
    buffer = aligned_buffer(size)
    for header, place in found:
        assert bytes(store.read(place, header.block_hash, buffer)[1][:32]) == header.block_hash
    store.close()


def test_a_directory_belongs_to_one_process_and_its_files_to_one_user(tmp_path: Path, record: Record) -> None:
    """The second who comes is refused until the first has left; nobody else may read prompts out of the files."""
    directory = tmp_path / "made"
    store = open_store(directory)
    fill(store, record, range(1))
    with pytest.raises(CacheStoreBusyError, match="another process"):
        open_store(directory)
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700
    store.close()
    open_store(directory).close()


def test_a_store_never_grows_beyond_its_size(tmp_path: Path, record: Record) -> None:
    """A full one asks for a segment to be removed, and goes on when that is done."""
    store = open_store(tmp_path, capacity=8 * SIZE)
    written = fill(store, record, range(8))
    with pytest.raises(CacheStoreFullError):
        store.append(record("more")[1])
    assert store.sealed == [0]
    store.remove(0)
    store.append(record("more")[1])
    assert store.file_bytes == 8 * SIZE == sum(path.stat().st_size for path in tmp_path.glob("*.seg"))
    with pytest.raises(KeyError):
        store.read(written[0][1], written[0][0].block_hash, aligned_buffer(SIZE))
    store.close()


def test_more_than_the_disk_has_is_refused_at_the_start(tmp_path: Path) -> None:
    """The error names the setting, the directory, what is wanted and what is free."""
    with pytest.raises(CacheStoreError, match=r"swap_space wants .* GiB more .* are free"):
        open_store(tmp_path, capacity=1 << 60)


def test_a_path_that_is_no_directory_is_refused_at_the_start(tmp_path: Path) -> None:
    """With the path, and before a model has been loaded for minutes."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheStoreError, match="cannot be used"):
        open_store(tmp_path / "file" / "below")


class ReadOnly(Disk):
    def open(self, path: Path, *, create: bool = False) -> int:
        raise OSError(30, "Read-only file system")


def test_a_read_only_directory_is_refused_at_the_start(tmp_path: Path) -> None:
    """Nobody finds out at the first write."""
    with pytest.raises(CacheStoreError, match="Read-only"):
        SegmentStore(tmp_path, 16 * SIZE, 4 * SIZE, ReadOnly()).open()


def test_a_record_that_was_killed_stays_dead(tmp_path: Path, record: Record) -> None:
    """Neither a read nor a new process finds it; its neighbours are untouched."""
    store = open_store(tmp_path)
    (first, place), second = fill(store, record, range(2))
    store.kill(place, RecordHeader(first.block_hash, 0, 64, 64, first.body_checksum, dead=True))
    with pytest.raises(BlockCorruptError):
        store.read(place, first.block_hash, aligned_buffer(SIZE))
    store.close()
    store = SegmentStore(tmp_path, 16 * SIZE, 4 * SIZE)
    assert store.open() == [second]
    store.close()


def test_a_file_of_another_name_is_left_alone(tmp_path: Path, record: Record) -> None:
    """It is neither read nor removed."""
    (tmp_path / "notes.seg").write_text("mine")
    store = open_store(tmp_path)
    fill(store, record, range(2))
    store.close()
    assert (tmp_path / "notes.seg").read_text() == "mine"


def test_a_directory_whose_files_cannot_be_opened_is_refused_and_not_kept(tmp_path: Path, record: Record) -> None:
    """The error names the setting; the next process finds the directory free."""
    store = open_store(tmp_path)
    fill(store, record, range(2))
    store.close()

    class Exhausted(Disk):
        def open(self, path: Path, *, create: bool = False) -> int:
            if path.suffix == ".seg":
                raise OSError(24, "Too many open files")
            return super().open(path, create=create)

    with pytest.raises(CacheStoreError, match=r"l3_cache_path .*Too many open files"):
        SegmentStore(tmp_path, 16 * SIZE, 4 * SIZE, Exhausted()).open()
    open_store(tmp_path).close()


def test_a_closed_store_takes_nothing(tmp_path: Path, record: Record) -> None:
    """A thread that is late writes no file into a directory that another process may have by now."""
    store = open_store(tmp_path)
    store.close()
    with pytest.raises(CacheStoreFullError, match="closed"):
        fill(store, record, range(1))
    assert not list(tmp_path.glob("*.seg"))
