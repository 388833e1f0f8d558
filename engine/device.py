"""The device a model runs on, a CPU so far: its memory, and the operations compiled for it."""

import ctypes
import math
import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import KernelBuildError
from kernels.cpu.native import BuildError, build_all, cache_directory

_HUGE_PAGE_BYTES = 2 << 20


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A large zeroed tensor that takes memory as it is written to, in huge pages where the system has them.

    Paged attention reads a few kilobytes here and there: with small pages every read would also miss the TLB.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < 2 * _HUGE_PAGE_BYTES:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes].view(dtype).view(shape)


def return_freed_memory() -> None:
    """Give back what was freed after weights were prepared: glibc keeps it (40 to 190 MB for a model of 135 M weights).
    Elsewhere nothing happens."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def build_kernels(directory: Path | None = None) -> list[Path]:
    """Compile all variants of the CPU's operations ahead of time, for an image that will run where no compiler is.

    Without a directory they go where a worker looks for them. Raises KernelBuildError with the compiler's words.
    """
    try:
        return build_all(directory or cache_directory())
    except BuildError as error:
        raise KernelBuildError(str(error)) from error
