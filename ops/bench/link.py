"""An engine's process as the benchmark sees it: JSON lines both ways, its peak memory, and its end."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
from roster import ORACLE, PEERS, ROSTER, num_threads

SERVE = Path(__file__).parent / "peers" / "serve.py"


class EngineFailedError(Exception):
    """The engine could not load, answered with an error, or ended."""


class EngineProcess:
    """One engine with one precision, loaded for one workload. What it prints goes to `log`.

    It is stopped by signal while nothing is asked of it: threads of an idle engine that wake a thousand times a second
    made another, which spins at its barriers, twenty times slower.
    """

    def __init__(self, engine: str, precision: str, workload: str, log: Path) -> None:
        self.engine, self.precision, self._log = engine, precision, log
        entry, threads = ROSTER.get(engine, ORACLE), num_threads()
        options = {"engine": engine, "precision": precision, "workload": workload, "threads": threads}
        command = [str(entry.python), str(SERVE), json.dumps(options | {"peers": str(PEERS)})]
        with log.open("a") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env=os.environ | entry.environment(threads),
            )
        try:
            hello = self._read()
        except BaseException:  # an interrupt must not leave an engine behind that nobody knows
            self.abort()
            raise
        self.name: str = hello["name"]
        self.settings: dict[str, str] = hello["settings"]
        self._signal(signal.SIGSTOP)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        content: dict[str, Any] = json.loads(line) if line else {"error": f"the process ended, see {self._log}"}
        if "error" in content:
            self.close()
            raise EngineFailedError(f"{self.engine} {self.precision}: {content['error']}")
        return content

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        """The answer to a task; raises EngineFailedError, after which the process is gone."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def peak_mb(self) -> float:
        """The most memory each of its processes ever had resident, added up; shared pages count in each."""
        return sum(_high_water_kb(pid) for pid in self._pids()) / 1024

    def reset_peak(self) -> None:
        """Forget the peaks so far: what is resident now is the new start."""
        for pid in self._pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def _pids(self) -> list[int]:
        try:
            process = psutil.Process(self._process.pid)
            return [process.pid, *(child.pid for child in process.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        """End the process by closing its input; one that does not end in time is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.abort()
        self._process.stdout.close()

    def abort(self) -> None:
        """End the process and all that it has started, at once; one that has ended already is left alone."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            for pid in reversed(self._pids()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def _high_water_kb(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
