"""Which partitions are open, whatever happens while their starts are asked for."""

import asyncio

from worker.broker.api import OffsetCommit, TopicPartition

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
