"""Commits what the offset tracker allows. The only writer of committed offsets."""

import asyncio
import contextlib

from worker.broker.api import BrokerError, CommitRejectedError, Consumer, OffsetCommit
from worker.offsets import OffsetTracker


class Committer:
    """Commits soon after progress, at most once an interval; a rejected or failed commit is tried again later."""

    def __init__(self, consumer: Consumer, tracker: OffsetTracker, *, interval_seconds: float = 0.5) -> None:
        self._consumer = consumer
        self._tracker = tracker
        self._interval = interval_seconds
        self._progress = asyncio.Event()
        self._lock = asyncio.Lock()

    def progressed(self) -> None:
        """There may be something new to commit."""
        self._progress.set()

    async def run(self) -> None:
        """Commit in the background until cancelled."""
        while True:
            await self._progress.wait()
            self._progress.clear()
            with contextlib.suppress(CommitRejectedError):
                try:
                    await self.commit()
                except BrokerError as error:
                    if not error.retriable:
                        raise
                    self._progress.set()
            await asyncio.sleep(self._interval)

    async def commit(self) -> None:
        """Commit the watermarks of assigned partitions. Raises BrokerError."""
        async with self._lock:
            ours = self._consumer.assignment()
            offsets = {tp: offset for tp, offset in self._tracker.to_commit().items() if tp in ours}
            if offsets:
                await self._consumer.commit({tp: OffsetCommit(offset) for tp, offset in offsets.items()})
                self._tracker.committed(offsets)
