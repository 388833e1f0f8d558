"""What a commit says beside its offset, as text for Kafka's offset metadata. Knows bytes and limits, no tracker.

Layout: `v4f1.` and base64 of CRC32, a flag for zlib, and the body: digest of cluster, topic and partition; base; then
the done-set (the smaller of bitset and runs), leases and marks, each as differences of offsets in LEB128.
"""

import base64
import binascii
import hashlib
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise

from worker.broker.api import TopicPartition

MAX_CHARS = 3000
MAX_BODY_BYTES = 1 << 16
MAX_OFFSETS = 1 << 15
_VERSION = "v4f1."
_IDENTITY_BYTES = 8
_DEATHS_SHIFT, _VANISHED_SHIFT = 2, 8
_MAX_DEATHS = 63


class MarkState(IntEnum):
    """How a prompt was marked when the commit was made; the values are on the wire."""

    TOGETHER = 0
    ALONE = 1
    WAITING = 2


@dataclass(frozen=True, slots=True)
class Mark:
    """A prompt that was running, or waits. `vanished` owners had it in work, `deaths` of them while it ran alone."""

    state: MarkState
    deaths: int = 0
    vanished: int = 0

    @property
    def word(self) -> int:
        """As a number on the wire; counts beyond their bits stay at the largest."""
        deaths = min(self.deaths, _MAX_DEATHS)
        return self.vanished << _VANISHED_SHIFT | deaths << _DEATHS_SHIFT | self.state

    @classmethod
    def of_word(cls, word: int) -> "Mark":
        """Raises ValueError for a state that is not known."""
        state = MarkState(word & (1 << _DEATHS_SHIFT) - 1)
        return cls(state, word >> _DEATHS_SHIFT & _MAX_DEATHS, word >> _VANISHED_SHIFT)


@dataclass(frozen=True, slots=True)
class CommitMetadata:
    """State above the committed offset: what is done, until when (Unix ms) others leave which offset alone, marks."""

    done: frozenset[int] = frozenset()
    leases: Mapping[int, int] = field(default_factory=dict)
    marks: Mapping[int, Mark] = field(default_factory=dict)


EMPTY = CommitMetadata()


class MetadataCodec:
    """Encodes for one cluster. Whatever does not fit is left out, and whatever is not ours reads as empty: both cost
    duplicates or a mark, never a prompt."""

    def __init__(self) -> None:
        self._cluster_id = ""

    def bind(self, cluster_id: str) -> None:
        """Name the cluster; before the first commit."""
        self._cluster_id = cluster_id

    def encode(self, tp: TopicPartition, base: int, metadata: CommitMetadata) -> str:
        """At most `MAX_CHARS` characters, "" when there is nothing to say. Marks are kept longest, then leases."""
        while metadata != EMPTY:
            text = self._encode(tp, base, metadata)
            if text is not None and len(text) <= MAX_CHARS:
                return text
            metadata = _smaller(metadata)
        return ""

    def decode(self, tp: TopicPartition, text: str, *, base: int, end: int) -> CommitMetadata:
        """Never raises. Empty unless made here for this cluster, partition and `base`, with all offsets below `end`."""
        try:
            found = self._decode(tp, text, base)
        except (ValueError, IndexError, struct.error, zlib.error, binascii.Error):
            return EMPTY
        offsets = (*found.done, *found.leases, *found.marks)
        return found if all(base <= offset < end for offset in offsets) else EMPTY

    def _identity(self, tp: TopicPartition) -> bytes:
        framed = b"".join(
            struct.pack(">I", len(part)) + part for part in (self._cluster_id.encode(), tp.topic.encode())
        )
        return hashlib.sha256(framed + struct.pack(">I", tp.partition)).digest()[:_IDENTITY_BYTES]

    def _encode(self, tp: TopicPartition, base: int, metadata: CommitMetadata) -> str | None:
        """None for what is too large to be read again."""
        if len(metadata.done) > MAX_OFFSETS:
            return None
        out = bytearray(self._identity(tp))
        _put(out, base)
        done = sorted(metadata.done)
        bits, runs = _bitset(done, base), _runs(done, base)
        kind, coded = (0, bits) if bits is not None and len(bits) <= len(runs) else (1, runs)
        _put(out, kind)
        _put(out, len(coded))
        out += coded
        _put_table(out, base, metadata.leases)
        _put_table(out, base, {at: mark.word for at, mark in metadata.marks.items()})
        if len(out) > MAX_BODY_BYTES:
            return None
        packed = zlib.compress(bytes(out), 9)
        body = b"\x01" + packed if len(packed) < len(out) else b"\x00" + bytes(out)
        return _VERSION + base64.b64encode(struct.pack(">I", zlib.crc32(body)) + body).decode("ascii")

    def _decode(self, tp: TopicPartition, text: str, base: int) -> CommitMetadata:
        if not text.startswith(_VERSION):
            return EMPTY
        raw = base64.b64decode(text.removeprefix(_VERSION), validate=True)
        if struct.unpack(">I", raw[:4])[0] != zlib.crc32(raw[4:]):
            return EMPTY
        body = raw[5:] if raw[4] == 0 else zlib.decompressobj().decompress(raw[5:], MAX_BODY_BYTES)
        data = _Cursor(body)
        if data.take(_IDENTITY_BYTES) != self._identity(tp) or data.number() != base:
            return EMPTY
        kind, coded = data.number(), data.take(data.number())
        done = _from_bitset(coded, base) if kind == 0 else _from_runs(coded, base)
        leases = data.table(base)
        marks = data.table(base)
        return CommitMetadata(
            frozenset(done),
            leases,
            {at: Mark.of_word(word) for at, word in marks.items()},
        )


class _Cursor:
    """Reads from bytes; raises IndexError past their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def take(self, num_bytes: int) -> bytes:
        part = self._data[self._at : self._at + num_bytes]
        if len(part) != num_bytes:
            raise IndexError(num_bytes)
        self._at += num_bytes
        return part

    def number(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise IndexError("a number without an end")

    def table(self, base: int) -> dict[int, int]:
        entries, at = {}, base
        for _ in range(self.number()):
            at += self.number()
            entries[at] = self.number()
        return entries


def _put(out: bytearray, value: int) -> None:
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _put_table(out: bytearray, base: int, table: Mapping[int, int]) -> None:
    _put(out, len(table))
    at = base
    for offset, value in sorted(table.items()):
        _put(out, offset - at)
        _put(out, value)
        at = offset


def _bitset(done: list[int], base: int) -> bytes | None:
    """None where it would be absurdly long."""
    if not done:
        return b""
    if done[-1] - base >= MAX_OFFSETS:
        return None
    bits = sum(1 << (offset - base) for offset in done)
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _from_bitset(coded: bytes, base: int) -> Iterator[int]:
    return (base + 8 * i + bit for i, byte in enumerate(coded) for bit in range(8) if byte >> bit & 1)


def _runs(done: list[int], base: int) -> bytes:
    """Gap and length of each run of neighbours, in turn."""
    out, at = bytearray(), base
    starts = [0, *(i for i, (a, b) in enumerate(pairwise(done), 1) if b != a + 1), len(done)]
    for start, stop in pairwise(starts):
        if start < stop:
            _put(out, done[start] - at)
            _put(out, stop - start)
            at = done[stop - 1] + 1
    return bytes(out)


def _from_runs(coded: bytes, base: int) -> list[int]:
    data, at, done = _Cursor(coded), base, list[int]()
    while data.left:
        at += data.number()
        length = data.number()
        if len(done) + length > MAX_OFFSETS:
            raise ValueError(length)
        done += range(at, at + length)
        at += length
    return done


def _smaller(metadata: CommitMetadata) -> CommitMetadata:
    """Without half of what may go first: done offsets, then leases, then marks; the lowest stay."""
    if metadata.done:
        return replace(metadata, done=frozenset(_lower_half(metadata.done)))
    if metadata.leases:
        return replace(metadata, leases={at: metadata.leases[at] for at in _lower_half(metadata.leases)})
    return replace(metadata, marks={at: metadata.marks[at] for at in _lower_half(metadata.marks)})


def _lower_half(offsets: Collection[int]) -> list[int]:
    return sorted(offsets)[: len(offsets) // 2]
