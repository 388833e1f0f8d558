"""The script that runs a Kafka node leaves none behind."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import broker
import pytest

SCRIPT = Path(broker.__file__)
FAKE_NODE = """
import signal, sys, time
def end(*_):
    time.sleep(0.5)
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
signal.pause()
"""


@contextmanager
def started(*command: str | Path, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive its test."""
    with subprocess.Popen(command, text=True, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def processes() -> str:
    """The command lines of all processes."""
    return subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_stop_returns_when_the_node_has_ended(tmp_path, monkeypatch):
    """What is started next finds its ports and its data free."""
    monkeypatch.setattr(broker, "STATE", tmp_path)
    with started(sys.executable, "-c", FAKE_NODE, "kafka.Kafka", stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == "up\n"
        (tmp_path / "pid").write_text(str(node.pid))
        broker.stop_started()
        assert node.poll() == 0
    assert not (tmp_path / "pid").exists()


def test_stop_leaves_another_process_with_its_pid_alone(tmp_path, monkeypatch):
    """A pid is used again after a restart of the machine."""
    monkeypatch.setattr(broker, "STATE", tmp_path)
    with started(sys.executable, "-c", "input()", stdin=subprocess.PIPE) as other:
        (tmp_path / "pid").write_text(str(other.pid))
        broker.stop_started()
        assert other.poll() is None
    assert not (tmp_path / "pid").exists()


@pytest.mark.kafka
@pytest.mark.usefixtures("kafka")  # skips, or fails, where Kafka cannot run
@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGINT])
def test_run_ends_its_node_with_itself(ends):
    """A supervisor's SIGTERM and Ctrl-C leave no process behind, also while the node starts."""
    with started(sys.executable, SCRIPT, "run", stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        starting = next(line for line in run.stdout if line.startswith("starting Kafka on"))
        folder = str(Path(starting.split()[-1]).parent)
        assert folder in processes()
        run.send_signal(ends)
        assert run.wait(30) == 0
    assert folder not in processes()
