"""The compiled operations, for the tests of this folder."""

import os
import shutil

import pytest

from kernels.cpu.native import NativeOps, load_native, supported_isas


@pytest.fixture(scope="session")
def ops() -> NativeOps:
    """The loaded operations. Skips only where they cannot be: no compiler, no such CPU, or V4FLASH_ISA=none."""
    loaded = load_native()
    if isinstance(loaded, NativeOps):
        return loaded
    possible = supported_isas() and os.environ.get("V4FLASH_ISA") != "none"
    if possible and (os.environ.get("CXX") or shutil.which("g++")):
        pytest.fail(f"there is a compiler, and no native operations: {loaded}")
    pytest.skip(f"no native operations: {loaded}")


@pytest.fixture
def tile_ops(ops: NativeOps) -> NativeOps:
    """Those of a variant that multiplies packed tiles; skips elsewhere, as there is nothing to run."""
    if not ops.has_tiles:
        pytest.skip(f"no tiles in this variant: {ops.isa}")
    return ops
