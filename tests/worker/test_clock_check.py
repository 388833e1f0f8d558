"""A machine whose clock is wrong, beside a broker whose clock is right."""

import asyncio

import pytest

from engine.scripted import ScriptedEngine
from worker.app import WorkerApp
from worker.broker.api import BrokerUnavailableError, Record
from worker.clock import SystemClock
from worker.clock_check import KEY, ClockCheck
from worker.settings import Settings

HOUR_MS = 3_600_000


class WrongClock(SystemClock):
    """Off by so much."""

    def __init__(self, off_ms: int) -> None:
        super().__init__()
        self.off_ms = off_ms

    def wall_ms(self) -> int:
        return super().wall_ms() + self.off_ms


@pytest.mark.parametrize("off_ms", [HOUR_MS, -HOUR_MS], ids=["ahead", "behind"])
async def test_a_worker_an_hour_off_ends_nobody_and_says_so(rig, prompt, off_ms):
    """A prompt with time is answered, `/ready` names the fault; without it the same headers end a prompt in time."""
    broker = rig.broker
    wrong = WorkerApp(Settings(group_id="workers", prefix="v4flash"), broker, ScriptedEngine(), WrongClock(off_ms))
    deadline = str(SystemClock().wall_ms() + 30_000)
    await rig.send(prompt(), x_request_id="ttl", x_ttl_ms="30000")
    await rig.send(prompt(), x_request_id="deadline", x_deadline_ms=deadline)
    async with rig.running(wrong):
        await rig.until_replied("ttl")
        await rig.until_replied("deadline")
        assert wrong.unready is not None
        side = "ahead of" if off_ms > 0 else "behind"
        assert f"3600 s {side} the broker's" in wrong.unready
    assert rig.answer("ttl")
    assert rig.answer("deadline")
    await rig.send(prompt(), x_request_id="late", x_deadline_ms=str(SystemClock().wall_ms() - 1))
    await rig.serve_all()
    assert rig.error("late") == "deadline_exceeded"


async def test_a_clock_that_was_mended_is_believed_again(rig):
    """The next comparison counts; one that the broker does not take changes nothing."""
    clock = WrongClock(HOUR_MS)
    check = ClockCheck(rig.producer, rig.names.control, clock)
    await check.ask()
    check.take(rig.broker.records(rig.names.control)[-1])
    assert check.reason is not None
    clock.off_ms = 0
    rig.broker.fail_next("send", BrokerUnavailableError("away"))
    await check.ask()
    assert check.reason is not None
    await check.ask()
    check.take(rig.broker.records(rig.names.control)[-1])
    assert check.reason is None


async def test_what_others_wrote_says_nothing_of_our_clock(rig):
    """Not another worker's comparison, not a record with its client's time, not garbage."""
    check = ClockCheck(rig.producer, rig.names.control, WrongClock(HOUR_MS))
    await ClockCheck(rig.producer, rig.names.control, WrongClock(HOUR_MS)).ask()
    check.take(rig.broker.records(rig.names.control)[-1])
    await check.ask()
    ours = rig.broker.records(rig.names.control)[-1]
    check.take(Record(ours.topic, 0, 9, ours.timestamp_ms, KEY, ours.value, append_time=False))
    check.take(Record(ours.topic, 0, 9, ours.timestamp_ms, KEY, b"\xff"))
    check.take(Record(ours.topic, 0, 9, ours.timestamp_ms, None, ours.value))
    assert check.reason is None


async def test_the_clock_is_compared_again_and_again(rig):
    """While the worker runs."""
    check = ClockCheck(rig.producer, rig.names.control, SystemClock())
    pauses: list[float] = []
    slept = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            slept.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(check.run(sleep=sleep))
    async with asyncio.timeout(5):
        await slept.wait()
    task.cancel()
    assert pauses == [60.0] * 3
    assert len(rig.broker.records(rig.names.control)) == 2
