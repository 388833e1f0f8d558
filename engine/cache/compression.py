"""zstd for blocks on the SSD, used only while measurements say that it makes them come back sooner."""

import time
from dataclasses import dataclass, field

import zstandard

from engine.errors import BlockCorruptError

NUM_SAMPLES = 8
RETRY_AFTER = 1024


@dataclass(slots=True)
class Compression:
    """Tries the first blocks and again every `RETRY_AFTER`: a block is packed only if its shorter read and its
    unpacking together take less time than the whole read. Belongs to one thread."""

    level: int = 1
    sampled: int = 0
    skipped: int = 0
    stored_share: float = 1.0
    unpack_seconds: float = 0.0
    _packer: zstandard.ZstdCompressor = field(init=False)

    def __post_init__(self) -> None:
        self._packer = zstandard.ZstdCompressor(level=self.level)

    @property
    def is_worth_it(self) -> bool:
        return self.sampled < NUM_SAMPLES or self._gain > 0

    @property
    def _gain(self) -> float:
        return self._read_seconds * (1 - self.stored_share) - self.unpack_seconds

    _read_seconds: float = 0.0

    def pack(self, payload: memoryview, read_seconds: float) -> bytes | None:
        """The compressed payload, or None where it should be stored as it is. `read_seconds` is a whole block's."""
        self._read_seconds = read_seconds
        if not self.is_worth_it:
            self.skipped += 1
            if self.skipped < RETRY_AFTER:
                return None
            self.skipped = self.sampled = 0
        packed = self._packer.compress(payload)
        if self.sampled < NUM_SAMPLES:
            began = time.perf_counter()
            self.unpack(memoryview(packed), len(payload))
            seconds = time.perf_counter() - began
            self.sampled += 1
            self.stored_share += (len(packed) / len(payload) - self.stored_share) / self.sampled
            self.unpack_seconds += (seconds - self.unpack_seconds) / self.sampled
            return None  # a sample alone proves nothing yet
        return packed if len(packed) < len(payload) else None

    @staticmethod
    def unpack(payload: memoryview, num_bytes: int) -> memoryview:
        """The block as it was. Raises BlockCorruptError for what is none."""
        try:
            block = memoryview(zstandard.ZstdDecompressor().decompress(payload, max_output_size=num_bytes))
        except zstandard.ZstdError as error:
            raise BlockCorruptError(str(error)) from None
        if len(block) != num_bytes:
            raise BlockCorruptError(f"{len(block)} bytes come out instead of {num_bytes}")
        return block
