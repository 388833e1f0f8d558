"""Which partitions are open, whatever happens while their starts are asked for."""

import asyncio

from worker.broker.api import BrokerUnavailableError, CommitRejectedError, OffsetCommit, TopicPartition
from worker.committer import Committer

TP = TopicPartition("v4flash.prompts.bulk", 0)


class SlowConsumer:
    """Tells what is committed when it is let go."""

    def __init__(self) -> None:
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    def pause(self, tps) -> None:
        pass

    def seek(self, tp, offset: int) -> None:
        pass

    async def committed(self, tps):
        self.asked.set()
        await self.go_on.wait()
        return {tp: OffsetCommit(3) for tp in tps}

    async def end_offsets(self, tps):
        return dict.fromkeys(tps, 7)


async def test_partitions_that_are_revoked_while_their_start_is_asked_for_stay_closed(rig):
    """They are another worker's, or another consumer's, by then."""
    assignment, consumer = rig.app().member.assignment, SlowConsumer()
    assignment._consumer = consumer
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(assignment.on_assigned(frozenset({TP})))
        await consumer.asked.wait()
        await assignment.on_revoked(frozenset({TP}))
        consumer.go_on.set()
    assert assignment.open == set()
    await assignment.on_assigned(frozenset({TP}))
    assert (assignment.open, assignment.starts) == ({TP}, {TP: 3})


class Rejecting(SlowConsumer):
    """The group is in a rebalance: it takes no commit until that is over."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on.set()
        self.rebalancing, self.offsets, self.taken = True, [], asyncio.Event()

    def assignment(self):
        return frozenset({TP})

    async def offsets_for_time(self, tps, timestamp_ms: int):
        return dict.fromkeys(tps, 5)

    async def commit(self, commits) -> None:
        if self.rebalancing:
            raise CommitRejectedError("rebalance in progress")
        self.offsets.append(commits[TP].offset)
        self.taken.set()


async def test_what_was_done_when_a_revoke_could_not_commit_is_committed_after_it(rig):
    """The commit is tried again while nothing is ours and finds nothing; the partition comes back, and nothing more
    ever happens on it."""
    app, consumer = rig.app(), Rejecting()
    assignment, tracker, codec = app.member.assignment, app.member.tracker, app.member.codec
    codec.bind("cluster")
    committer = Committer(consumer, tracker, codec, interval_seconds=0.01)
    assignment.bind(consumer, committer)
    await assignment.on_assigned(frozenset({TP}))
    tracker.arrived(TP, 3)
    tracker.finished(TP, 3, tracker.started(TP, 3))
    await assignment.on_revoked(frozenset({TP}))
    await committer.commit()  # "succeeds"
    consumer.rebalancing = False
    await assignment.on_assigned(frozenset({TP}))
    running = asyncio.create_task(committer.run())
    async with asyncio.timeout(1):
        await consumer.taken.wait()
    running.cancel()
    assert consumer.offsets == [4]


async def test_a_log_that_cannot_begin_again_yet_is_no_end(rig):
    """The broker is away just then: whoever serves until the end has not reached it."""
    assignment, consumer = rig.app().member.assignment, Rejecting()
    assignment._consumer, committed = consumer, consumer.committed
    await assignment.on_assigned(frozenset({TP}))

    async def away(tps):
        raise BrokerUnavailableError("away")

    consumer.committed = away
    await assignment.begin_again(TP)
    assert (assignment.at_ends, assignment.unready) == (False, "not in the group yet")
    consumer.committed = committed
    await assignment.on_assigned(frozenset({TP}))
    assert (assignment.unready, assignment.starts) == (None, {TP: 5})
