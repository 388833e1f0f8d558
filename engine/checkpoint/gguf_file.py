"""Opens a GGUF file and says what is wrong with it. Reads no tensor: who needs only its texts needs no torch."""

import math
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy

from engine.errors import ModelLoadError

_ARRAY_HEAD_BYTES = 12  # the type of the items and their number


class _Reader(gguf.GGUFReader):
    """Says which tensor a truncated file has lost, never reads past its end, and reads an array of the metadata at once
    where gguf takes several steps for each of its numbers and texts: seconds for a vocabulary."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        numbers = super()._get(offset, dtype, count, override_order)
        if len(numbers) < count:
            raise ValueError(f"it ends at byte {len(self.data)}")
        return numbers

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        head = self.data[orig_offs : orig_offs + _ARRAY_HEAD_BYTES].tobytes()
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I" or len(head) < _ARRAY_HEAD_BYTES:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = (
            gguf.GGUFValueType(int.from_bytes(head[:4], sys.byteorder)),
            int.from_bytes(head[4:], sys.byteorder),
        )
        start, memory = orig_offs + _ARRAY_HEAD_BYTES, self.data.data
        if kind is gguf.GGUFValueType.STRING:
            texts, end = _texts(memory, start, count)
            return end - orig_offs, texts, list(range(count)), [gguf.GGUFValueType.ARRAY, kind]
        scalar = self.gguf_scalar_to_np.get(kind)
        if scalar is None:
            return super()._get_field_parts(orig_offs, raw_type)
        numbers = numpy.frombuffer(memory, scalar, count, start)
        return _ARRAY_HEAD_BYTES + numbers.nbytes, [numbers], [0], [gguf.GGUFValueType.ARRAY, kind]

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind[0])]
            end = start_offs + int(offset[0]) + math.prod(dims.tolist()) // block * block_bytes
            if end > len(self.data):
                raise ModelLoadError(f"the file is truncated at tensor {bytes(name).decode()}")
        super()._build_tensors(start_offs, fields)


def _texts(memory: memoryview, start: int, count: int) -> tuple[list[Any], int]:
    """Each text after its length in eight bytes, and where the last one ends."""
    texts = []
    for _ in range(count):
        length = int.from_bytes(memory[start : start + 8], sys.byteorder)
        start += 8
        texts.append(numpy.frombuffer(memory, numpy.uint8, length, start))
        start += length
    return texts, start


def open_gguf(path: Path) -> tuple[gguf.GGUFReader, dict[str, Any]]:
    """The reader of a file, and its metadata by name; raises ModelLoadError for one that is damaged or truncated."""
    try:
        reader = _Reader(path)
        return reader, {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        # gguf checks no bounds: what is cut short or not GGUF ends as an index, a view, a number or a name that is none
        raise ModelLoadError(f"{path} is damaged, truncated or no GGUF file: {error}") from error
