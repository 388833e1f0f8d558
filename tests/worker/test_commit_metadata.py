import base64
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.broker.api import TopicPartition
from worker.commit_metadata import EMPTY, MAX_CHARS, CommitMetadata, Mark, MarkState, MetadataCodec

TP = TopicPartition("prompts", 3)
END = 1 << 40


def codec(cluster: str = "cluster") -> MetadataCodec:
    made = MetadataCodec()
    made.bind(cluster)
    return made


FULL = CommitMetadata(
    frozenset({12, 13, 20}), {11: 1_700_000_000_000}, {14: Mark(MarkState.ALONE, 2, 3), 15: Mark(MarkState.TOGETHER)}
)

offsets = st.integers(0, 5000)
marks = st.builds(Mark, st.sampled_from(MarkState), st.integers(0, 63), st.integers(0, 999))
metadata = st.builds(
    CommitMetadata,
    st.frozensets(offsets, max_size=200),
    st.dictionaries(offsets, st.integers(0, 1 << 42), max_size=40),
    st.dictionaries(offsets, marks, max_size=40),
)


@given(metadata, st.integers(0, 1 << 33))
def test_what_fits_comes_back_as_it_was(found, base):
    """And what does not fit loses done offsets first: those that remain are true, and never too long."""
    shifted = CommitMetadata(
        frozenset(base + at for at in found.done),
        {base + at: until for at, until in found.leases.items()},
        {base + at: mark for at, mark in found.marks.items()},
    )
    text = codec().encode(TP, base, shifted)
    assert len(text) <= MAX_CHARS
    back = codec().decode(TP, text, base=base, end=END)
    assert back.done <= shifted.done
    assert back.leases == shifted.leases
    assert back.marks == shifted.marks
    if len(shifted.done) <= 32:
        assert back == shifted


def test_a_window_of_a_million_ends_stays_within_the_limit():
    """Whatever the window's setting, the broker's limit holds, and the oldest marks are kept."""
    marks = {at * 977: Mark(MarkState.TOGETHER) for at in range(20_000)}
    text = codec().encode(TP, 0, CommitMetadata(frozenset(range(1, 200_000, 2)), {}, marks))
    assert len(text) <= MAX_CHARS
    back = codec().decode(TP, text, base=0, end=END)
    assert back.marks.items() <= marks.items()
    assert 0 in back.marks


@pytest.mark.parametrize(
    "other",
    [
        lambda text: codec("elsewhere").decode(TP, text, base=10, end=100),
        lambda text: codec().decode(TopicPartition("other", 3), text, base=10, end=100),
        lambda text: codec().decode(TopicPartition("prompts", 2), text, base=10, end=100),
        lambda text: codec().decode(TP, text, base=9, end=100),
        lambda text: codec().decode(TP, text, base=10, end=20),
        lambda text: codec().decode(TP, text.replace("v4f1.", "v4f2."), base=10, end=100),
        lambda text: codec().decode(TP, text[:-4], base=10, end=100),
        lambda text: codec().decode(TP, "", base=10, end=100),
        lambda text: codec().decode(TP, "some other tool's note", base=10, end=100),
    ],
    ids=["cluster", "topic", "partition", "base", "end", "version", "cut", "empty", "foreign"],
)
def test_metadata_that_was_not_made_for_this_commit_is_empty(other):
    """Another cluster, partition, base, version or log: no offset is believed to be done."""
    text = codec().encode(TP, 10, FULL)
    assert codec().decode(TP, text, base=10, end=100) == FULL
    assert other(text) == EMPTY


@given(st.binary(max_size=300), st.booleans())
def test_hostile_metadata_never_raises(raw, packed):
    """A right checksum around anything at all."""
    body = b"\x01" + zlib.compress(raw) if packed else b"\x00" + raw
    text = "v4f1." + base64.b64encode(struct.pack(">I", zlib.crc32(body)) + body).decode()
    assert codec().decode(TP, text, base=10, end=100) == EMPTY


def test_a_bomb_is_not_unpacked():
    """What unpacks to more than the limit is no metadata."""
    body = b"\x01" + zlib.compress(b"\x00" * 50_000_000)
    text = "v4f1." + base64.b64encode(struct.pack(">I", zlib.crc32(body)) + body).decode()
    assert codec().decode(TP, text, base=0, end=100) == EMPTY
