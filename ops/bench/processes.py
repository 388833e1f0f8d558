"""Other processes of a benchmark: a worker started like a user starts it, and the CPU seconds that processes take."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


def start_worker(log: Path, **flags: object) -> "subprocess.Popen[bytes]":
    """`v4flash worker` with these settings; a flag that is True has no value. Its probes take free ports."""
    command = [sys.executable, "-m", "worker", "worker", "--port", "0", "--metrics-port", "0", "--log-level", "warning"]
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=dict(os.environ))


def cpu_seconds(pid: int) -> float:
    """User and system seconds so far of a process and of those below it: a worker serves in a child."""
    top = psutil.Process(pid)
    times = [process.cpu_times() for process in (top, *top.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


class CpuLog:
    """Samples the CPU seconds of processes, so that those of any span can be told afterwards."""

    def __init__(self, pids: dict[str, int], *, interval_seconds: float = 0.05) -> None:
        self._pids = pids
        self._interval = interval_seconds
        self._samples: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "CpuLog":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def seconds(self, name: str, since: float, until: float) -> float:
        """CPU seconds of a process between two Unix times."""
        return self._at(name, until) - self._at(name, since)

    def _at(self, name: str, when: float) -> float:
        samples = self._samples[name]
        before = max((s for s in samples if s[0] <= when), default=samples[0])
        after = min((s for s in samples if s[0] >= when), default=samples[-1])
        if after[0] == before[0]:
            return before[1]
        return before[1] + (after[1] - before[1]) * (when - before[0]) / (after[0] - before[0])

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            for name, pid in self._pids.items():
                try:
                    self._samples[name].append((time.time(), cpu_seconds(pid)))
                except psutil.Error:
                    continue  # it has ended: its last sample stands
