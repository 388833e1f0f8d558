"""The library of compiled operations: every variant passes the tests of this folder, and one that cannot be had is a
reason, not an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.native import supported_isas
from kernels.cpu.native.build import library_path

TESTS = [Path(__file__).with_name(name) for name in ("test_native.py", "test_native_attention.py", "test_kv_forms.py")]
OTHERS = [] if os.environ.get("V4FLASH_ISA") else supported_isas()[1:]


@pytest.mark.parametrize("variant", OTHERS)
def test_every_other_variant_passes_too(variant: str) -> None:
    """One library a process: a child with V4FLASH_ISA runs this folder's native tests on it."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, TESTS)]
    environment = os.environ | {"V4FLASH_ISA": variant}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def child(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"from kernels.cpu.native import load_native\n{code}"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_an_impossible_variant_is_an_error_and_none_a_reason() -> None:
    """A typing error in V4FLASH_ISA is never taken for a wish."""
    assert "V4FLASH_ISA=v9: choose from amx, v4, v3, none" in child("load_native()", V4FLASH_ISA="v9")
    assert child("print(load_native())", V4FLASH_ISA="none").strip() == "V4FLASH_ISA=none"


def test_without_a_compiler_the_reason_is_given(tmp_path: Path) -> None:
    """Nothing is raised: the caller goes on with what torch has, and says why."""
    out = child("print(load_native())", PATH=str(tmp_path), CXX="", V4FLASH_ISA="", V4FLASH_KERNEL_CACHE=str(tmp_path))
    if supported_isas():
        assert "no C++ compiler" in out
    else:
        assert "no variant" in out


def test_a_failing_compiler_is_a_reason_with_its_words(tmp_path: Path) -> None:
    """The first lines of what the compiler said reach the log; no half-made library stays."""
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho out of cheese >&2\nexit 1\n")
    compiler.chmod(0o755)
    if not supported_isas():
        pytest.skip("no variant for this CPU")
    out = child("print(load_native())", CXX=str(compiler), V4FLASH_ISA="", V4FLASH_KERNEL_CACHE=str(tmp_path / "cache"))
    assert "out of cheese" in out
    assert list((tmp_path / "cache").glob("*.so")) == []


def test_a_changed_source_makes_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is a digest of sources, torch's version and variant."""
    (tmp_path / "a.cpp").write_text("int a;")
    monkeypatch.setattr("kernels.cpu.native.build._SOURCES", tmp_path)
    first = library_path("v3", tmp_path)
    assert library_path("v4", tmp_path) != first
    (tmp_path / "a.cpp").write_text("int b;")
    assert library_path("v3", tmp_path) != first
