"""Which partitions stand still, what is done about it, and what `/live` says."""

import asyncio
from functools import partial

import pytest

from topics.routes import Route, RouteTable
from worker.broker.api import BrokerUnavailableError, TopicNotAvailableError, TopicPartition, UnreadableRecordsError
from worker.subscription import Subscription
from worker.watchdog import Watchdog

ONE, TWO = TopicPartition("t", 0), TopicPartition("t", 1)


class Hands:
    """A clock and a consumer, moved by hand."""

    def __init__(self) -> None:
        self.time, self.num_renewed = 0.0, 0
        self.at = {ONE: 0, TWO: 0}
        self.ends = {ONE: 0, TWO: 0}
        self.opened: set[TopicPartition] = {ONE, TWO}
        self.joined, self.broken = True, False
        self.watchdog = Watchdog(self, lambda: self.opened, stall_seconds=30.0)

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
        if self.broken:
            raise BrokerUnavailableError("away")

    async def pass_seconds(self, seconds: int, **records: bool) -> None:
        """Both partitions are asked every second."""
        for _ in range(seconds):
            self.time += 1.0
            for tp, name in ((ONE, "one"), (TWO, "two")):
                self.watchdog.asked((tp,))
                self.watchdog.answered((tp,), fruitful={tp} if records.get(name) else ())
            await self.watchdog.look(self)


class Unreadable:
    """A consumer whose next records do not come."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def start(self) -> None: ...

    async def poll(self, *_):
        raise self.error

    poll_any = poll


class Counts:
    """An admin client of a cluster without topics."""

    async def partition_counts(self):
        return {}


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


@pytest.mark.parametrize("error", [UnreadableRecordsError("bad CRC"), TopicNotAvailableError("no right to read")])
async def test_a_partition_whose_records_cannot_be_read_is_judged_by_nobody(error):
    """Neither another consumer nor another process reads them better; a poll of all partitions says nothing of one."""
    hands, consumer = Hands(), Unreadable(error)
    hands.ends[ONE] = 5
    subscription = Subscription(
        lambda topics, listener: consumer,
        None,
        RouteTable(routes=(Route(topics=("t",)),)),
        Counts(),
        watchdog=hands.watchdog,
    )
    await subscription.start()
    for _ in range(200):
        hands.time += 1.0
        for poll in (subscription.poll(ONE, 1, 0), subscription.poll_any((ONE, TWO), 0)):
            with pytest.raises(type(error)):
                await poll
        await hands.watchdog.look(hands)
    assert (hands.num_renewed, hands.watchdog.reason) == (0, None)


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


@pytest.mark.parametrize("unjoined", [False, True])
async def test_partitions_that_were_never_opened_are_taken_again_until_it_helps(unjoined):
    """The broker was away when they came to us, or when we joined: Kafka tells nobody again. Nothing is asked then."""
    hands = Hands()
    if unjoined:
        hands.joined, hands.at = False, {}
    else:
        hands.opened = set()
    for _ in range(30):
        await hands.watchdog.look(hands)
        hands.time += 1.0
    assert hands.num_renewed == 0
    hands.broken = True
    for _ in range(3):
        with pytest.raises(BrokerUnavailableError):
            await hands.watchdog.look(hands)
    hands.broken = False
    await hands.watchdog.look(hands)
    assert hands.num_renewed == 4
    hands.joined, hands.opened = True, {ONE, TWO}
    for _ in range(100):
        hands.time += 1.0
        await hands.watchdog.look(hands)
    assert hands.num_renewed == 4


async def test_an_assignment_that_failed_is_made_good(rig, prompt, monkeypatch):
    """The broker does not say where our partitions begin when they come to us: the watchdog joins again."""
    monkeypatch.setattr("worker.membership.Watchdog", partial(Watchdog, stall_seconds=0.2))
    app = rig.app()
    await rig.send(prompt(), x_request_id="r")
    rig.broker.fail_next("committed", BrokerUnavailableError("away"))
    async with rig.running(app):
        await rig.until_replied("r")
    assert rig.answer("r")


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
            await app.member.subscription.renew()
        await rig.until_replied("r")
    assert rig.answer("r")
    assert len(made) == 2
    assert await rig.uncommitted() == {}
