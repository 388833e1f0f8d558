"""Sets up the clients, each in an environment of its own under `.cache/interop`, once for each version of its sources.

The tests do it, or `python tests/interop/environments.py`; it names the tools that are not on this machine.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "interop"
SPRING, NESTJS, PYTHON = CACHE / "spring", CACHE / "nestjs", CACHE / "python"


@dataclass(frozen=True, slots=True)
class Environment:
    """`tools` must be there; `sources` are what `make` builds from in the folder that it is given."""

    tools: tuple[str, ...]
    sources: tuple[str, ...] = ()
    make: Callable[[Path], None] | None = None


def _spring(folder: Path) -> None:
    project = folder / "project"  # a copy: Maven writes nothing beside the sources
    shutil.copytree(HERE / "spring", project)
    goals = ["compile", "dependency:copy-dependencies", f"-DoutputDirectory={folder / 'libs'}"]
    _run(["mvn", "-q", "-B", "-f", str(project / "pom.xml"), f"-Dbuild.folder={folder / 'target'}", *goals])


def _nestjs(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "ask.mjs"):
        shutil.copy(HERE / "nestjs" / name, folder / name)
    _run(["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error", f"--prefix={folder}"])


def _python(folder: Path) -> None:
    uv = ["uv"] if shutil.which("uv") else [sys.executable, "-m", "uv"]
    _run([*uv, "venv", "-q", "--python", sys.executable, str(folder)])
    requirements = str(HERE / "python" / "requirements.txt")
    _run([*uv, "pip", "install", "-q", "--python", str(folder / "bin" / "python"), "-r", requirements])


ENVIRONMENTS = {
    "spring": Environment(("java", "mvn"), ("spring/pom.xml", "spring/src"), _spring),
    "nestjs": Environment(("node", "npm"), ("nestjs/package.json", "nestjs/ask.mjs"), _nestjs),
    "python": Environment(("uv",), ("python/requirements.txt",), _python),
    "kcat": Environment(("kcat",)),
}


def missing_tools(name: str) -> list[str]:
    """The commands that this environment needs and this machine lacks."""
    return [tool for tool in ENVIRONMENTS[name].tools if shutil.which(tool) is None]


def prepare(name: str) -> None:
    """Build it unless it is there already. Raises CalledProcessError, with what the builder said."""
    environment, folder = ENVIRONMENTS[name], CACHE / name
    if environment.make is None:
        return
    stamp, digest = CACHE / f".{name}-done", _digest(environment.sources)
    if stamp.exists() and stamp.read_text() == digest:
        return
    print(f"setting up {name} in {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    environment.make(folder)
    stamp.write_text(digest)


def _digest(sources: tuple[str, ...]) -> str:
    files: list[Path] = []
    for source in sources:
        path = HERE / source
        files += sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=600, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    for each in ENVIRONMENTS:
        if lacking := missing_tools(each):
            print(f"NOT SET UP: {each} needs {' and '.join(lacking)}")
        else:
            prepare(each)
