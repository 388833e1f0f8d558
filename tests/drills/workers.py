"""Real worker processes of one drill."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path


class Workers:
    """Starts members of one group on the scripted engine; whatever is left is killed at the end."""

    def __init__(self, prefix: str, folder: Path) -> None:
        self._prefix = prefix
        self._folder = folder
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self, bootstrap_servers: str, **flags: object) -> "subprocess.Popen[bytes]":
        given = {
            "engine": "scripted",
            "bootstrap-servers": bootstrap_servers,
            "prefix": self._prefix,
            "group-id": self._prefix,
            "port": 0,
            "metrics-port": 0,
            "log-format": "json",
            "session-timeout-seconds": 6,
            **{name.replace("_", "-"): value for name, value in flags.items()},
        }
        command = [sys.executable, "-m", "worker", "worker"]
        for name, value in given.items():
            command += [f"--{name}", str(value)]
        with self.log(len(self.all)).open("wb") as out:
            self.all.append(subprocess.Popen(command, stdout=out, stderr=out))
        return self.all[-1]

    def log(self, index: int) -> Path:
        return self._folder / f"worker{index}.log"

    async def end(self, worker: "subprocess.Popen[bytes]", *, seconds: float = 40.0) -> int:
        """SIGTERM, and its exit code."""
        worker.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(worker.wait, seconds)

    async def kill(self, worker: "subprocess.Popen[bytes]") -> None:
        worker.kill()
        await asyncio.to_thread(worker.wait)

    def stop(self) -> None:
        for worker in self.all:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
