"""Commits what the offset tracker allows. The only writer of committed offsets."""

import asyncio
from collections.abc import Mapping

import structlog

from worker.broker.api import (
    BrokerError,
    CommitRejectedError,
    Consumer,
    OffsetCommit,
    TopicNotAvailableError,
    TopicPartition,
)
from worker.commit_metadata import MetadataCodec
from worker.offsets import OffsetTracker
from worker.partition_state import Progress

MARK_SECONDS = 1.0

log = structlog.get_logger(__name__)


class Committer:
    """Commits soon after progress, at most once an interval; a rejected or failed commit is tried again later."""

    def __init__(
        self, consumer: Consumer, tracker: OffsetTracker, codec: MetadataCodec, *, interval_seconds: float = 0.5
    ) -> None:
        self._consumer = consumer
        self._tracker = tracker
        self._codec = codec
        self._interval = interval_seconds
        self._progress = asyncio.Event()
        self._lock = asyncio.Lock()
        self._failing = False

    def progressed(self) -> None:
        """There may be something new to commit."""
        self._progress.set()

    async def run(self) -> None:
        """Commit in the background until cancelled."""
        while True:
            await self._progress.wait()
            self._progress.clear()
            try:
                await self.commit()
            except CommitRejectedError:  # a rebalance: what stays ours is committed after it
                self._progress.set()
            except TopicNotAvailableError as error:  # deleted: the next assignment is without it
                log.warning("a prompt topic takes no commit", error=str(error) or type(error).__name__)
                self._progress.set()
            except BrokerError as error:
                if not error.retriable:
                    raise
                self._progress.set()
            await asyncio.sleep(self._interval)

    async def commit(self) -> None:
        """Commit the progress of assigned partitions. Raises BrokerError."""
        async with self._lock:
            await self._write(self._tracker.to_commit())

    async def mark(self) -> None:
        """Commit, before the work begins, which prompts begin. Waits `MARK_SECONDS` at most, and not at all while
        commits fail: the work is then done without its marks, which follow with the next commit that succeeds."""
        if self._failing:
            self._progress.set()
            return
        try:
            async with asyncio.timeout(MARK_SECONDS):
                await self.commit()
        except (BrokerError, TimeoutError):
            self._failing = True
            self._progress.set()

    async def hand_over(self, progress: Mapping[TopicPartition, Progress]) -> None:
        """The last commit of partitions that leave us. Raises BrokerError."""
        async with self._lock:
            await self._write(progress)

    async def _write(self, progress: Mapping[TopicPartition, Progress]) -> None:
        ours = self._consumer.assignment()
        made = {tp: step for tp, step in progress.items() if tp in ours}
        if made:
            commits = {
                tp: OffsetCommit(offset, self._codec.encode(tp, offset, metadata))
                for tp, (offset, metadata) in made.items()
            }
            await self._consumer.commit(commits)
            self._tracker.committed(made)
            self._failing = False
