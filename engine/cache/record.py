"""One block as it lies in a segment: a header of its own page, then the payload. Knows bytes, and no file."""

import struct
import zlib
from dataclasses import dataclass

import numpy

from engine.cache.block import BlockHash
from engine.cache.disk import ALIGNMENT, padded

HEADER_BYTES = ALIGNMENT
VERSION = 1
_MAGIC = b"v4KV"
_LAYOUT = struct.Struct("<4sHBBIIIII32s")
_CHECKSUM = struct.Struct("<I")
_LIVE, _DEAD = 0, 1


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """`depth` is the block's place in its chain; `stored_bytes` differ from `raw_bytes` where it is compressed."""

    block_hash: BlockHash
    depth: int
    raw_bytes: int
    stored_bytes: int
    body_checksum: int
    compressed: bool = False
    dead: bool = False

    @property
    def num_bytes(self) -> int:
        """The whole record, header and padding included."""
        return record_bytes(self.stored_bytes)

    def pack_into(self, page: memoryview) -> None:
        packed = _LAYOUT.pack(
            _MAGIC,
            VERSION,
            _DEAD if self.dead else _LIVE,
            self.compressed,
            self.depth,
            self.raw_bytes,
            self.stored_bytes,
            self.body_checksum,
            0,
            self.block_hash,
        )
        page[: len(packed)] = packed
        end = len(packed) + _CHECKSUM.size
        page[len(packed) : end] = _CHECKSUM.pack(zlib.crc32(packed))


def unpack_header(page: memoryview) -> RecordHeader | None:
    """The header at the start of `page`, or None for anything else: a torn one, zeros, another version."""
    packed = bytes(page[: _LAYOUT.size])
    if len(page) < _LAYOUT.size + _CHECKSUM.size:
        return None
    (checksum,) = _CHECKSUM.unpack_from(page, _LAYOUT.size)
    magic, version, state, compressed, depth, raw, stored, payload, _, block_hash = _LAYOUT.unpack(packed)
    if magic != _MAGIC or version != VERSION or zlib.crc32(packed) != checksum:
        return None
    return RecordHeader(block_hash, depth, raw, stored, payload, bool(compressed), state == _DEAD)


def record_bytes(payload_bytes: int) -> int:
    return HEADER_BYTES + padded(payload_bytes)


def body_checksum(body: memoryview) -> int:
    """Of whole pages, the padding included: the CRC-32 of the sums of their rows and of their columns of 8 bytes. It
    finds what a disk does to a block (a flipped bit, a lost or exchanged page) at five times the speed of a CRC of
    everything, so that a read costs little more than the disk. Whoever can write the files can forge it."""
    words = numpy.frombuffer(body, dtype=numpy.uint64).reshape(-1, ALIGNMENT // 8)
    return zlib.crc32(words.sum(axis=1).tobytes(), zlib.crc32(words.sum(axis=0).tobytes()))


def copy_block(target: memoryview, source: memoryview) -> None:
    """Without Python's lock: an assignment to a slice would hold all threads up for the whole copy."""
    numpy.copyto(numpy.frombuffer(target, dtype=numpy.uint8), numpy.frombuffer(source, dtype=numpy.uint8))
