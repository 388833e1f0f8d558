"""Reads a Hugging Face directory: config.json and one or several safetensors files."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.errors import ModelLoadError


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and all tensors; raises ModelLoadError naming the file that is missing or damaged."""
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path / 'config.json'} cannot be read: {error}") from error
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"there is no safetensors file in {path}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{file} is damaged or truncated{_lost(file)}: {error}") from error
    return config, tensors


def _lost(file: Path) -> str:
    """Name of the first tensor that lies beyond the end of a file, for the message; empty if that cannot be said."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(size))
        held = file.stat().st_size - 8 - size
        ends = sorted((entry["data_offsets"][1], name) for name, entry in header.items() if name != "__metadata__")
        return next((f" at tensor {name}" for end, name in ends if end > held), "")
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError):
        return ""
