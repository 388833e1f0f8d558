"""Real worker processes of one drill, and what they say over HTTP."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from broker import free_ports


@dataclass(eq=False)
class Worker:
    """A worker as its operator sees it: a process with two ports, and the processes below it."""

    process: "subprocess.Popen[bytes]"
    log: Path
    port: int
    metrics_port: int

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """To the worker alone, as an operator sends it."""
        self.process.send_signal(number)

    def signal_all(self, number: int) -> None:
        """To every process of the worker, the one that serves first: what befalls a machine or a container."""
        for process in self.tree():
            with suppress(psutil.Error):
                process.send_signal(number)

    def tree(self) -> list[psutil.Process]:
        """Its processes, the youngest first."""
        with suppress(psutil.Error):
            top = psutil.Process(self.process.pid)
            return [*reversed(top.children(recursive=True)), top]
        return []

    @property
    def rss_bytes(self) -> int:
        """Of all its processes."""
        total = 0
        for process in self.tree():
            with suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    async def get(self, path: str, *, port: int | None = None) -> tuple[int, str]:
        """Status and body; 0 while nobody listens."""
        return await asyncio.to_thread(_get, f"http://127.0.0.1:{port or self.port}{path}")

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        _, text = await self.get("/metrics", port=self.metrics_port)
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


class Workers:
    """Starts members of one group on the scripted engine; whatever is left is killed at the end."""

    def __init__(self, prefix: str, folder: Path) -> None:
        self._prefix = prefix
        self._folder = folder
        self.all: list[Worker] = []

    def start(
        self,
        bootstrap_servers: str,
        *,
        environ: dict[str, str] | None = None,
        log_folder: Path | None = None,
        program: tuple[str, ...] = ("-m", "worker"),
        within: tuple[str, ...] = (),
        **flags: object,
    ) -> Worker:
        port, metrics_port = free_ports(2)
        given = {
            "engine": "scripted",
            "bootstrap-servers": bootstrap_servers,
            "prefix": self._prefix,
            "group-id": self._prefix,
            "port": port,
            "metrics-port": metrics_port,
            "log-format": "json",
            "session-timeout-seconds": 6,
            **{name.replace("_", "-"): value for name, value in flags.items()},
        }
        command = [*within, sys.executable, *program, "worker"]
        for name, value in given.items():
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        log = (log_folder or self._folder) / f"worker{len(self.all)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **(environ or {})})
        self.all.append(Worker(process, log, port, metrics_port))
        return self.all[-1]

    async def until_serving(self, worker: Worker, *, seconds: float = 240.0) -> None:
        """It takes prompts."""
        ends = time.monotonic() + seconds
        while (await worker.get("/ready"))[0] != 200:
            assert worker.runs, worker.log.read_text()[-3000:]
            assert time.monotonic() < ends, worker.log.read_text()[-3000:]
            await asyncio.sleep(0.05)

    async def end(self, worker: Worker, *, seconds: float = 90.0) -> int:
        """SIGTERM, and its exit code."""
        worker.signal(signal.SIGTERM)
        return await asyncio.to_thread(worker.process.wait, seconds)

    async def kill(self, worker: Worker) -> None:
        worker.signal_all(signal.SIGKILL)
        await asyncio.to_thread(worker.process.wait)

    def stop(self) -> None:
        for worker in self.all:
            if worker.runs:
                worker.signal_all(signal.SIGKILL)
                worker.process.wait()


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()
    except OSError:
        return 0, ""
