"""Native C++ operations for x86-64: which instruction set this CPU runs, built where need be, proved before use."""

import os
import platform
from functools import cache
from pathlib import Path

import torch

from kernels.cpu.native.build import BuildError, build_all, build_variant, cache_directory
from kernels.cpu.native.fakes import register_fakes
from kernels.cpu.native.known_answers import wrong_answers
from kernels.cpu.native.ops import NativeOps

__all__ = ["BuildError", "NativeOps", "build_all", "cache_directory", "load_native", "supported_isas"]

# Flags of /proc/cpuinfo: what CPUID says and the system saves.
_V4_FLAGS = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"}
_NEEDED_FLAGS = {
    "amx": _V4_FLAGS | {"amx_tile", "amx_bf16", "amx_int8"},  # the v4 variant with the tile unit in use
    "v4": _V4_FLAGS,
    "v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
}


def supported_isas() -> list[str]:
    """Instruction sets that this CPU can run, the fastest first."""
    if platform.machine() != "x86_64":
        return []
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
    return [isa for isa, needed in _NEEDED_FLAGS.items() if needed <= flags]


@cache
def load_native() -> NativeOps | str:
    """The operations for the best instruction set, or why there are none; V4FLASH_ISA (amx, v4, v3, none) may choose.

    Raises ValueError if V4FLASH_ISA names what does not exist or what this CPU cannot run.
    """
    supported, forced = supported_isas(), os.environ.get("V4FLASH_ISA")
    if forced == "none":
        return "V4FLASH_ISA=none"
    if forced and forced not in _NEEDED_FLAGS:
        raise ValueError(f"V4FLASH_ISA={forced}: choose from {', '.join([*_NEEDED_FLAGS, 'none'])}")
    if forced and forced not in supported:
        raise ValueError(f"V4FLASH_ISA={forced}: this CPU cannot run it, only {', '.join(supported) or 'none'}")
    if not supported:
        return f"no variant for this CPU ({platform.machine()})"
    isa = forced or supported[0]
    try:
        library = build_variant("v3" if isa == "v3" else "v4", cache_directory())
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except (BuildError, OSError) as error:
        return str(error)
    if isa == "amx" and not torch.ops.v4flash.use_amx(True):
        isa = "v4"  # the system does not lend the tile unit
    register_fakes()
    ops = NativeOps(isa, library)
    if wrong := wrong_answers(ops):
        return f"the {isa} variant computes wrong: {', '.join(wrong)}"
    return ops
