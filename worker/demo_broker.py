"""A broker for the demo that comes with a Python package: noida-db, which speaks Kafka's protocol."""

import asyncio
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

HOST = "127.0.0.1"
STOP_SECONDS = 5.0


def _binary() -> Path | None:
    spec = find_spec("noida_db")
    path = Path(spec.origin).parent / "noida-db" if spec is not None and spec.origin else None
    return path if path is not None and path.is_file() and sys.platform == "linux" else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def embedded_broker() -> AsyncIterator[str | None]:
    """The address of a broker on a free loopback port, ended and deleted on leaving; None where there is no build."""
    binary = _binary()
    if binary is None:
        yield None
        return
    binary.chmod(0o755)
    folder = tempfile.mkdtemp(prefix="v4flash-demo-")
    port = _free_port()
    arguments = ["start", "--only", "kafka", "--kafka-port", str(port), "--host", HOST, "--data-dir", folder]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(str(binary), *arguments, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        yield f"{HOST}:{port}"
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        shutil.rmtree(folder, ignore_errors=True)
