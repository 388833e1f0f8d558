"""Children of the supervisor as the system sees them."""

import os
import subprocess
import sys

import pytest

from worker.memory import available_bytes, resident_bytes
from worker.processes import SUPERVISED, PidProcess, inherited, reap_orphans


def begin(*command: str) -> PidProcess:
    return PidProcess(os.posix_spawn(command[0], command, {}))


async def test_a_process_is_waited_for_and_killed_by_its_descriptor():
    """The exit code is negative for a signal; a kill of one that has ended does nothing."""
    assert await begin("/bin/sh", "-c", "exit 3").wait() == 3
    sleeper = begin("/bin/sleep", "60")
    sleeper.kill()
    assert await sleeper.wait() == -9
    sleeper.kill()


def test_orphans_are_reaped_and_our_own_children_are_not():
    """Process 1 takes leave of what others left behind, never of what somebody waits for."""
    ours = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, ours, os.WEXITED | os.WNOWAIT)
    reap_orphans(frozenset({ours}))
    assert os.waitpid(ours, 0) == (ours, 0)
    orphan = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
    reap_orphans(frozenset())
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan, 0)


def test_a_process_that_a_user_starts_has_no_supervisor(monkeypatch):
    """The variable is for one process only, not for what that starts."""
    monkeypatch.delenv(SUPERVISED, raising=False)
    assert inherited() is None


def test_the_container_limits_what_is_available(tmp_path):
    """What is left below its limit, and the host's memory where it has none."""
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_bytes(tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 600_000
    assert resident_bytes(os.getpid()) > 1_000_000


@pytest.mark.timeout(120)
def test_a_worker_stops_while_no_broker_answers(tmp_path):
    """SIGTERM ends it with 0 also when it has never reached Kafka, and both its processes are gone."""
    command = [sys.executable, "-m", "worker", "worker", "--engine", "scripted", "--bootstrap-servers", "127.0.0.1:1"]
    command += ["--port", "0", "--metrics-port", "0", "--log-format", "json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        try:
            assert next(line for line in iter(worker.stderr.readline, "") if "model loaded" in line)
        finally:
            worker.terminate()
        assert worker.wait(30) == 0
        assert worker.stderr.read() is not None  # the child holds the other end until it ends
