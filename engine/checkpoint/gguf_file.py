"""Opens a GGUF file and says what is wrong with it. Reads no tensor: who needs only its texts needs no torch."""

import math
from pathlib import Path
from typing import Any

import gguf

from engine.errors import ModelLoadError


class _Reader(gguf.GGUFReader):
    """Says which tensor a truncated file has lost."""

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind[0])]
            end = start_offs + int(offset[0]) + math.prod(dims.tolist()) // block * block_bytes
            if end > len(self.data):
                raise ModelLoadError(f"the file is truncated at tensor {bytes(name).decode()}")
        super()._build_tensors(start_offs, fields)


def open_gguf(path: Path) -> tuple[gguf.GGUFReader, dict[str, Any]]:
    """The reader of a file, and its metadata by name; raises ModelLoadError for one that is damaged or truncated."""
    try:
        reader = _Reader(path)
        return reader, {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, KeyError, IndexError) as error:
        # gguf checks no bounds: what is cut short or not GGUF ends as an index, a view, a number or a name that is none
        raise ModelLoadError(f"{path} is damaged, truncated or no GGUF file: {error}") from error
