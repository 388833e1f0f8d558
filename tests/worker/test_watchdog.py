"""Which partitions stand still, what is done about it, and what `/live` says."""

import asyncio

from worker.broker.api import TopicPartition
from worker.watchdog import Watchdog

ONE, TWO = TopicPartition("t", 0), TopicPartition("t", 1)


class Hands:
    """A clock and a consumer, moved by hand."""

    def __init__(self) -> None:
        self.time, self.num_renewed = 0.0, 0
        self.at = {ONE: 0, TWO: 0}
        self.ends = {ONE: 0, TWO: 0}
        self.watchdog = Watchdog(self, stall_seconds=30.0)

    def now(self) -> float:
        return self.time

    def wall_ms(self) -> int:
        return 0

    def assignment(self):
        return frozenset(self.at)

    async def positions(self, tps):
        return {tp: self.at[tp] for tp in tps}

    async def end_offsets(self, tps):
        return {tp: self.ends[tp] for tp in tps}

    async def renew(self) -> None:
        self.num_renewed += 1

    async def pass_seconds(self, seconds: int, **records: bool) -> None:
        """Both partitions are asked every second."""
        for _ in range(seconds):
            self.time += 1.0
            for tp, name in ((ONE, "one"), (TWO, "two")):
                self.watchdog.asked((tp,))
                self.watchdog.answered((tp,), fruitful={tp} if records.get(name) else ())
            await self.watchdog.look(self)


async def test_a_partition_with_nothing_to_read_does_not_stall():
    """Silence is no fault, nor are offsets without records, which the position passes."""
    hands = Hands()
    await hands.pass_seconds(200)
    hands.at[ONE] = hands.ends[ONE] = 7
    await hands.pass_seconds(200)
    assert (hands.num_renewed, hands.watchdog.reason) == (0, None)


async def test_a_fetch_that_stands_still_gets_another_consumer_and_then_fails_the_probe():
    """The remedy comes once; `/live` names the partition only when it did not help, and no longer than that."""
    hands = Hands()
    hands.ends[ONE] = 5
    await hands.pass_seconds(29, two=True)
    assert hands.num_renewed == 0
    await hands.pass_seconds(35, two=True)
    assert (hands.num_renewed, hands.watchdog.reason) == (1, None)
    await hands.pass_seconds(65, two=True)
    assert (hands.num_renewed, hands.watchdog.reason) == (1, "no progress on t[0]")
    await hands.pass_seconds(1, one=True, two=True)
    assert hands.watchdog.reason is None


async def test_a_partition_that_nobody_asks_for_is_not_judged():
    """Backpressure is no stall."""
    hands = Hands()
    await hands.pass_seconds(1)
    hands.ends[ONE] = hands.ends[TWO] = 5
    for _ in range(200):
        hands.time += 1.0
        await hands.watchdog.look(hands)
    assert hands.num_renewed == 0


async def test_a_poll_that_never_returns_is_a_stall():
    """What was asked before it is still waiting."""
    hands = Hands()
    await hands.pass_seconds(1)
    hands.ends[TWO] = 5
    hands.watchdog.asked((ONE,))
    for _ in range(70):
        hands.time += 1.0
        await hands.watchdog.look(hands)
    assert hands.num_renewed == 1


async def test_a_worker_whose_poll_hangs_joins_again_and_serves(rig, prompt, monkeypatch):
    """The first consumer hangs in a poll until it is stopped; the second answers, and the worker lives."""
    made, consumer, polling = [], rig.broker.consumer, asyncio.Event()

    def hanging(group, topics, listener):
        made.append(inner := consumer(group, topics, listener))
        if len(made) == 1:
            ended, stop = asyncio.Event(), inner.stop

            async def poll(*_):
                polling.set()
                await ended.wait()
                return []

            async def stopping():
                ended.set()
                await stop()

            inner.poll, inner.poll_any, inner.stop = poll, poll, stopping
        return inner

    monkeypatch.setattr(rig.broker, "consumer", hanging)
    app = rig.app()
    await rig.send(prompt(), x_request_id="r")
    async with rig.running(app):
        async with asyncio.timeout(5):
            await polling.wait()
            await app.subscription.renew()
        await rig.until_replied("r")
    assert rig.answer("r")
    assert len(made) == 2
    assert await rig.uncommitted() == {}
