"""The last steps and decisions, when something hangs, crashes, or somebody asks."""

import json
import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from engine.api import EngineStats
from engine.flight import FlightRecorder
from engine.scripted import ScriptedEngine
from worker.errors import StartError
from worker.flight_log import FlightLog, HangWatch
from worker.loop_watch import LoopWatch
from worker.serve import Serving
from worker.settings import Settings


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def reasons(folder: Path) -> list[object]:
    return [lines(path)[0]["reason"] for path in sorted(folder.iterdir())]


def test_the_youngest_events_are_kept_and_written_for_their_owner_only(tmp_path: Path) -> None:
    """Bounded memory; why and when in front; a second file beside the first."""
    flight = FlightRecorder(max_events=3)
    for i in range(5):
        flight.record("step", float(i), rows=i)
    log = FlightLog(flight, tmp_path)
    first, second = log.write("because"), log.write("again")
    assert first is not None
    assert second is not None
    assert first != second
    head, *rest = lines(first)
    threads = [event for event in rest if event["kind"] == "thread"]
    (main,) = (thread["stack"] for thread in threads if thread["name"] == "MainThread")
    assert any("test_the_youngest_events" in place for place in main)
    events = rest[len(threads) :]
    assert head["reason"] == "because"
    assert [event["rows"] for event in events] == [2, 3, 4]
    assert stat.S_IMODE(first.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_written_is_no_second_fault(tmp_path: Path) -> None:
    """The crash that is reported is the first one."""
    assert FlightLog(FlightRecorder(), tmp_path / "absent").write("because") is None


def test_a_hang_is_told_once_and_again_only_after_a_step() -> None:
    """Nothing runs: nothing hangs. A step that ends begins the time anew."""
    watch = HangWatch(hang_seconds=10)
    busy = EngineStats(num_running=1, steps_total=5)
    told = [watch.hangs(busy, now) for now in (0.0, 9.0, 10.0, 20.0)]
    assert told == [False, False, True, False]
    assert not watch.hangs(EngineStats(num_running=1, steps_total=6), 21.0)
    assert watch.hangs(EngineStats(num_running=1, steps_total=6), 31.0)
    idle = EngineStats(num_running=0, steps_total=6)
    assert [watch.hangs(idle, now) for now in (32.0, 100.0)] == [False, False]


async def test_a_worker_records_its_decisions_and_no_text(rig, prompt):
    """What came to it, what began, what ended, by place."""
    engine = ScriptedEngine()
    await rig.send(prompt("kumquat"), "urgent", x_request_id="one")
    await rig.serve_all(engine)
    events = engine.flight.events()
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "assigned"
    assert [event["prompt"] for event in events if event["kind"] in ("start", "end")] == [
        "v4flash.prompts.urgent:0:0"
    ] * 2
    assert "kumquat" not in json.dumps(events)


class _App:
    """An application that sends itself SIGQUIT, and then ends as it is told."""

    stalled: str | None = None

    def __init__(self, end: Exception | None) -> None:
        self._end = end

    async def run(self, **_: object) -> None:
        os.kill(os.getpid(), signal.SIGQUIT)
        for thread in threading.enumerate():
            if thread.name == "flight log":
                thread.join()
        if self._end is not None:
            raise self._end


@pytest.mark.parametrize("end", [None, StartError("it broke")])
async def test_sigquit_and_a_crash_write_the_recorder(tmp_path: Path, end: Exception | None) -> None:
    """SIGQUIT goes on serving; a crash is told by the kinds of its errors and raised."""
    serving = Serving(Settings(engine="scripted", flight_recorder_dir=tmp_path))
    serving.app = _App(end)  # type: ignore[assignment]
    if end is None:
        await serving.run()
    else:
        with pytest.raises(ExceptionGroup):
            await serving.run()
    assert reasons(tmp_path) == ["SIGQUIT", *(["the worker ends with StartError"] if end is not None else [])]


def test_a_loop_that_stands_is_told_once_and_again_after_it_has_moved() -> None:
    """The thread sees what the loop cannot."""
    told = threading.Semaphore(0)
    with LoopWatch(told.release, stall_seconds=0.05) as watch:
        assert told.acquire(timeout=10)
        assert not told.acquire(timeout=0.1)
        watch.beat()
        assert told.acquire(timeout=10)
    assert not watch._thread.is_alive()
