"""The metadata of GGUF files, whose arrays are read at once."""

from pathlib import Path

import gguf
import pytest

from engine.checkpoint.gguf_file import open_gguf
from engine.errors import ModelLoadError

TEXTS = ["", "a", "né", "\u4e2d\u6587" * 40, "Ġthe"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("texts", TEXTS)
    writer.add_array("whole numbers", [3, -1, 2**31 - 1])
    writer.add_array("floats", [0.5, -2.25])
    writer.add_array("truths", [True, False, True])
    writer.add_string("after", "all of them")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_arrays_are_those_that_gguf_reads_itself(path: Path) -> None:
    """Of texts, of numbers of each kind, and what comes after them."""
    _, ours = open_gguf(path)
    theirs = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    assert ours == theirs
    assert ours["texts"] == TEXTS
    assert ours["after"] == "all of them"


def test_a_file_cut_short_anywhere_in_its_metadata_is_refused(path: Path) -> None:
    """Never a wrong number, never another error."""
    whole = path.read_bytes()
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        try:
            _, fields = open_gguf(path)
        except ModelLoadError:
            continue
        assert fields["after"] == "all of them", length  # only the padding behind is missing


@pytest.mark.parametrize("count", [2**40, 2**63, 2**64 - 1])
def test_an_array_that_says_it_is_longer_than_the_file_is_refused(path: Path, count: int) -> None:
    """Of texts and of numbers."""
    for name, kind in (("texts", gguf.GGUFValueType.STRING), ("floats", gguf.GGUFValueType.FLOAT32)):
        data = bytearray(path.read_bytes())
        at = data.index(name.encode()) + len(name) + 4  # behind the type of the field
        assert int.from_bytes(data[at : at + 4], "little") == kind
        data[at + 4 : at + 12] = count.to_bytes(8, "little")
        longer = path.with_name(f"{name}.gguf")
        longer.write_bytes(data)
        with pytest.raises(ModelLoadError, match="damaged, truncated or no GGUF file"):
            open_gguf(longer)
