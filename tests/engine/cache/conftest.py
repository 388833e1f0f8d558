"""A disk in memory that fails on request, blocks to write to it, and a core whose model is arithmetic."""

import errno
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.batch import Layers, SampledRow, ScheduledBatch, ScheduledRow
from engine.cache.block import root_hash
from engine.cache.cold_admission import ColdAdmission
from engine.cache.cost import TransferCost
from engine.cache.disk import Disk, aligned_buffer
from engine.cache.disk_tier import DiskTier
from engine.cache.layer_stream import LayerStream, Part
from engine.cache.record import HEADER_BYTES, RecordHeader, body_checksum, record_bytes
from engine.cache.segments import SegmentStore
from engine.cache.transfers import Transfers
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import Request
from engine.sampling_params import SamplingParams

PAYLOAD_BYTES = 64


class MemoryDisk(Disk):
    """Files are bytearrays; `on_read` and `on_write` see every call and may raise, wait or change the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[Path, bytearray] = {}
        self.descriptors: dict[int, Path] = {}
        self.open_files: dict[int, bytearray] = {}
        self.locked: set[Path] = set()
        self.on_read: Callable[[memoryview], None] = lambda data: None
        self.on_write: Callable[[memoryview], None] = lambda data: None
        self.free = 1 << 40
        self._next = 1000

    def prepare(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)

    def lock(self, directory: Path) -> int:
        if directory in self.locked:
            raise BlockingIOError(errno.EWOULDBLOCK, "held")
        self.locked.add(directory)
        return self._descriptor(directory)

    def unlock(self, fd: int) -> None:
        self.locked.discard(self.descriptors.pop(fd))

    def files(self, directory: Path, suffix: str) -> list[Path]:
        return sorted(path for path in self.contents if path.parent == directory and path.suffix == suffix)

    def size(self, fd: int) -> int:
        return len(self.open_files[fd])

    def close(self, fd: int) -> None:
        del self.open_files[fd]
        del self.descriptors[fd]

    def open(self, path: Path, *, create: bool = False) -> int:
        if create:
            self.contents[path] = bytearray()
        fd = self._descriptor(path)
        self.open_files[fd] = self.contents[path]
        return fd

    def allocate(self, fd: int, num_bytes: int) -> None:
        if num_bytes > self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.free -= num_bytes
        self.open_files[fd].extend(bytes(num_bytes))

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        data = self.open_files[fd][offset : offset + len(buffer)]
        buffer[: len(data)] = data
        self.on_read(buffer)
        return len(data)

    def write(self, fd: int, buffer: memoryview, offset: int) -> None:
        self.on_write(buffer)
        file = self.open_files[fd]
        if len(file) < offset + len(buffer):
            file.extend(bytes(offset + len(buffer) - len(file)))
        file[offset : offset + len(buffer)] = buffer

    def truncate(self, fd: int, num_bytes: int) -> None:
        del self.open_files[fd][num_bytes:]

    def remove(self, path: Path) -> None:
        content = self.contents.pop(path, None)
        self.free += 0 if content is None else len(content)

    def free_bytes(self, directory: Path) -> int:
        return self.free

    def _descriptor(self, path: Path) -> int:
        self._next += 1
        self.descriptors[self._next] = path
        return self._next


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


def named(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def make_record(name: object, depth: int = 0) -> tuple[RecordHeader, memoryview]:
    """A header and its whole record; the payload is the name's hash, twice."""
    payload = memoryview(named(name) * 2)
    record = aligned_buffer(record_bytes(len(payload)))
    record[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    header = RecordHeader(named(name), depth, len(payload), len(payload), body_checksum(record[HEADER_BYTES:]))
    header.pack_into(record)
    return header, record


@pytest.fixture
def record() -> Callable[..., tuple[RecordHeader, memoryview]]:
    return make_record


VOCABULARY = 97
ROOT = root_hash(tenant="", model_digest="test", layout_id="test")
SIZE, NUM_BLOCKS = 4, 24
LONG = 160  # tokens
PARTS = (Part(0, SIZE),)


def next_token(tokens: list[int]) -> int:
    """A model whose every token depends on all tokens before it."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCABULARY


def expected(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class TokenMemory:
    """Keeps a byte for each token where a model keeps KV, and answers from what it reads there."""

    bytes_per_block = SIZE

    def __init__(self) -> None:
        self.num_computed = 0
        self.cells = bytearray(NUM_BLOCKS * SIZE)
        self.fail_next = False
        self.batch = ScheduledBatch()
        self.cold = bytearray()

    def block_bytes(self, block_id: int) -> memoryview:
        return memoryview(self.cells)[block_id * SIZE : (block_id + 1) * SIZE]

    def stream_from(self, stream: LayerStream) -> None:
        self.stream = stream

    def segments(self, batch: ScheduledBatch) -> list[Layers]:
        return [(0, 1)]

    def launch(self, batch: ScheduledBatch, layers: Layers) -> None:
        self.batch = batch
        self.num_computed += batch.num_tokens
        for row in batch.rows:
            for position, token in enumerate(row.token_ids, start=row.start):
                self.cells[self.place(row, position)] = token
            self.cold = bytearray(len(row.cold_hashes) * SIZE)
            if row.cold_hashes:
                assert len(batch.rows) == 1, "a streamed row shares its step"
                places = [memoryview(self.cold)[i * SIZE : (i + 1) * SIZE] for i in range(len(row.cold_hashes))]
                self.stream.wait(self.stream.fetch(row.cold_hashes, PARTS, 0, places.__getitem__))
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("made to fail")

    @staticmethod
    def place(row: ScheduledRow, position: int) -> int:
        return row.block_table[position // SIZE - len(row.cold_hashes)] * SIZE + position % SIZE

    def sample(self) -> None:
        pass

    def collect(self) -> list[SampledRow]:
        sampled = []
        for row in self.batch.rows:
            if row.sample:
                positions = range(len(self.cold), row.start + len(row.token_ids))
                read = [*self.cold, *(self.cells[self.place(row, position)] for position in positions)]
                sampled.append(SampledRow(row.request_id, next_token(read)))
        return sampled


class TokenCores:
    """Cores over one directory of one disk, one after the other, and requests whose right answer is known."""

    num_blocks, vocabulary = NUM_BLOCKS, VOCABULARY

    def __init__(self, directory: Path, disk: MemoryDisk) -> None:
        self.directory, self.disk = directory, disk

    def open(
        self,
        *,
        admission: ColdAdmission = ColdAdmission.SECOND,
        block_seconds: float = 1e-4,
        max_model_len: int = 96,
        **options: Any,
    ) -> EngineCore:
        """`core.runner` counts `num_computed` tokens and fails its next step after `fail_next`."""
        config = EngineConfig(
            block_size=SIZE,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=6,
            max_num_batched_tokens=20,
            max_model_len=max_model_len,
        )
        memory, record = TokenMemory(), record_bytes(SIZE)
        stores = [SegmentStore(self.directory, 64 * record, 8 * record, self.disk)]
        tier = DiskTier(stores, admission=admission, clock=lambda: 0.0)
        tier.open()
        cost = TransferCost(num_readers=2, block_seconds=block_seconds, token_seconds=1.0)
        transfers = Transfers(tier, memory, cost, **{"num_write_slots": 8, **options})
        return EngineCore(config, memory, transfers=transfers, check=True)

    @staticmethod
    def request(name: str, prompt: tuple[int, ...], max_tokens: int = 4, **fields: Any) -> Request:
        return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0), ROOT, **fields)

    @staticmethod
    def expected(request: Request) -> list[int]:
        return expected(request.prompt_token_ids, request.params.max_tokens)

    @staticmethod
    def text(name: object, length: int) -> tuple[int, ...]:
        rng = random.Random(str(name))
        return tuple(rng.randrange(VOCABULARY) for _ in range(length))

    @staticmethod
    def run(core: EngineCore, *requests: Request, seconds: float = 20.0) -> dict[str, str]:
        """Step until all have ended; the errors by request."""
        for request in requests:
            core.add(request)
        errors: dict[str, str] = {}
        until = time.monotonic() + seconds
        while core.has_work and time.monotonic() < until:
            result = core.step()
            errors |= result.errors
            if not result.advanced:
                time.sleep(0.0002)
        assert not core.has_work, core.scheduler
        return errors


@pytest.fixture
def cores(tmp_path: Path, disk: MemoryDisk) -> TokenCores:
    return TokenCores(tmp_path, disk)


@pytest.fixture
def core(cores: TokenCores) -> Iterator[EngineCore]:
    """One that may meet sequences larger than its memory."""
    opened = cores.open(max_model_len=1_000)
    yield opened
    opened.close()


@pytest.fixture
def long(cores: TokenCores) -> Callable[..., Request]:
    """Makes a request of 40 blocks, where the memory has 24."""

    def make(name: str, length: int = LONG, max_tokens: int = 6, **fields: Any) -> Request:
        return cores.request(name, cores.text(name, length), max_tokens, **fields)

    return make
