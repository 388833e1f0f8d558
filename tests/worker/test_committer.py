"""When progress is committed, and when it is tried again."""

import asyncio

from worker.broker.api import CommitRejectedError, TopicPartition
from worker.commit_metadata import MetadataCodec
from worker.committer import Committer
from worker.offsets import OffsetTracker
from worker.partition_state import PartitionStart

TP = TopicPartition("prompts", 0)


class Refusing:
    """A consumer whose group is in a rebalance at its first commit."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.num_asked = 0
        self.taken = asyncio.Event()

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset({TP})

    async def commit(self, commits) -> None:
        self.num_asked += 1
        if self.num_asked == 1:
            raise CommitRejectedError("rebalance in progress")
        self.offsets.append(commits[TP].offset)
        self.taken.set()


async def test_a_commit_that_a_rebalance_rejects_is_tried_again_without_new_progress():
    """The partition may stay ours, and nothing else may ever happen on it."""
    tracker, codec, consumer = OffsetTracker(max_inflight_per_partition=4), MetadataCodec(), Refusing()
    codec.bind("cluster")
    tracker.assign({TP: PartitionStart(0, end=1)})
    tracker.arrived(TP, 0)
    tracker.finished(TP, 0, tracker.started(TP, 0))
    committer = Committer(consumer, tracker, codec, interval_seconds=0.01)
    committer.progressed()
    running = asyncio.create_task(committer.run())
    async with asyncio.timeout(5):
        await consumer.taken.wait()
    running.cancel()
    assert consumer.offsets == [1]
