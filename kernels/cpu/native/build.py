"""Compiles the C++ operations: two fixed variants, each one shared library named after the digest of all it is made of.

Knows the compiler and the cache directory; knows no operation.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "src"
VARIANTS: dict[str, tuple[str, ...]] = {
    "v3": ("-march=x86-64-v3",),
    # Tile instructions are compiled in and run only where the CPU has them and `use_amx` was called.
    "v4": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
# OpenMP is compiled in but not linked: its symbols come from the one library that torch has loaded.
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-DNDEBUG")
_COMPILE_TIMEOUT_SECONDS = 1200  # a minute when alone


class BuildError(Exception):
    """The native operations could not be compiled."""


def cache_directory() -> Path:
    """V4FLASH_KERNEL_CACHE, else a folder of the user's XDG cache."""
    if own := os.environ.get("V4FLASH_KERNEL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "v4flash" / "kernels"


def library_path(variant: str, directory: Path) -> Path:
    """Where the library of a variant lies: a change of a source, a flag or torch's version changes the name."""
    digest = hashlib.sha256()
    for part in (torch.__version__, variant, *VARIANTS[variant], *_FLAGS):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.iterdir()):
        content = source.read_bytes()
        digest.update(f"{source.name}\0{len(content)}\0".encode() + content)
    return directory / f"v4flash-{variant}-{digest.hexdigest()[:24]}.so"


def build_variant(variant: str, directory: Path) -> Path:
    """The library of a variant, compiled unless it is there already. Raises BuildError."""
    library = library_path(variant, directory)
    if library.exists():
        return library
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        raise BuildError("no C++ compiler: g++ is not on the path")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f"{library.name}.lock"):
            if not library.exists():  # another process may have built it meanwhile
                _log.warning("compiling the operations of this CPU (%s), once: it takes a minute or two", variant)
                _compile(compiler, variant, library)
    except OSError as error:
        raise BuildError(f"cannot build in {directory}: {error}") from error
    return library


def build_all(directory: Path) -> list[Path]:
    """Both variants, whatever this machine's CPU is. Raises BuildError."""
    return [build_variant(variant, directory) for variant in VARIANTS]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, variant: str, library: Path) -> None:
    torch_root = Path(torch.__file__).parent
    includes = [
        "-isystem",
        f"{torch_root / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    sources = sorted(_SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *_FLAGS, *VARIANTS[variant], *includes, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        unfinished = Path(folder) / library.name
        torch_libraries = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
        _run([compiler, "-shared", *map(str, objects), *torch_libraries, "-o", str(unfinished)])
        unfinished.replace(library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the compiler did not finish: {command[-3]}") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()[:4000]}")
