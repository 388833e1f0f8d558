"""Whether every partition moves on: sees what is asked and what comes, and heals a fetch that has stalled.

A partition stalls when it was asked for a whole interval, brought nothing, and has records past its position. The first
remedy is another consumer; `reason` says so when that did not help, which is when the process has to be restarted. A
consumer that could not start, or whose partitions were never opened since the broker was away at the rebalance, is
replaced until that helps: Kafka does not tell anybody again what is theirs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol

import structlog

from worker.broker.api import BrokerError, TopicPartition
from worker.clock import Clock

STALL_SECONDS = 30.0
LOOK_SECONDS = 5.0

log = structlog.get_logger(__name__)


class WatchedConsumer(Protocol):
    """What the watchdog asks of the consumer, and its remedy."""

    @property
    def joined(self) -> bool: ...

    def assignment(self) -> frozenset[TopicPartition]: ...

    async def positions(self, tps: Collection[TopicPartition]) -> Mapping[TopicPartition, int]: ...

    async def end_offsets(self, tps: Collection[TopicPartition]) -> Mapping[TopicPartition, int]: ...

    async def renew(self) -> None: ...


class Watchdog:
    """Told of every poll; `look` decides. A partition that nobody asks for (paused, window full) is never judged."""

    def __init__(
        self, clock: Clock, opened: Callable[[], Collection[TopicPartition]], *, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self._clock = clock
        self._opened = opened
        self._stall_seconds = stall_seconds
        self._fruitless_since: dict[TopicPartition, float] = {}
        self._asked_at: dict[TopicPartition, float] = {}
        self._behind: dict[TopicPartition, int] = {}
        self._waiting_since: float | None = None
        self._renewed: set[TopicPartition] = set()
        self._stalled: set[TopicPartition] = set()
        self._unopened_since: float | None = None

    @property
    def reason(self) -> str | None:
        """Which partitions stand still although the consumer was replaced; None when all is well."""
        if not self._stalled:
            return None
        return f"no progress on {', '.join(f'{tp.topic}[{tp.partition}]' for tp in sorted(self._stalled))}"

    def asked(self, tps: Collection[TopicPartition]) -> None:
        """A poll of these begins."""
        self._waiting_since = now = self._clock.now()
        for tp in tps:
            self._asked_at[tp] = now
            self._fruitless_since.setdefault(tp, now)

    def answered(self, tps: Collection[TopicPartition], *, fruitful: Collection[TopicPartition]) -> None:
        """The poll of these has ended, and brought records of the fruitful ones."""
        self._waiting_since = None
        now = self._clock.now()
        for tp in tps:
            self._asked_at[tp] = now
        for tp in fruitful:
            self._fruitless_since.pop(tp, None)
            self._behind.pop(tp, None)
            self._renewed.discard(tp)
            self._stalled.discard(tp)

    async def look(self, consumer: WatchedConsumer) -> None:
        """Judge, and replace the consumer where that may help. Raises BrokerError: a broker that is away says nothing
        of this process."""
        ours = consumer.assignment()
        if consumer.joined and ours <= set(self._opened()):
            self._unopened_since = None
        elif self._unopened_since is None:
            self._unopened_since = self._clock.now()
        elif self._clock.now() - self._unopened_since >= self._stall_seconds:
            log.warning("partitions were never opened and the consumer is replaced", num_partitions=len(ours))
            await consumer.renew()
            self._unopened_since = None
            return
        for times in (self._fruitless_since, self._asked_at):
            for tp in times.keys() - ours:
                del times[tp]
        self._behind = {tp: position for tp, position in self._behind.items() if tp in ours}
        if ours:  # empty while the consumer joins again
            self._renewed &= ours
            self._stalled &= ours
        suspects = self._suspects()
        if not suspects:
            return
        positions, ends = await consumer.positions(suspects), await consumer.end_offsets(suspects)
        suspects &= positions.keys() & ends.keys()
        standing = {tp for tp in suspects if self._behind.get(tp) == positions[tp] < ends[tp]}
        self._stalled = standing & self._renewed
        for tp in suspects:
            self._fruitless_since[tp] = self._clock.now()
            if positions[tp] < ends[tp]:
                self._behind[tp] = positions[tp]
            else:
                self._behind.pop(tp, None)
        if fresh := standing - self._renewed:
            log.warning("a fetch stands still and the consumer is replaced", partitions=sorted(fresh))
            self._renewed |= fresh
            self._behind.clear()
            await consumer.renew()

    async def run(
        self, consumer: WatchedConsumer, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Look now and then, until cancelled."""
        while True:
            await sleep(min(LOOK_SECONDS, self._stall_seconds))
            try:
                await self.look(consumer)
            except BrokerError as error:
                log.info("the watchdog could not look", error=str(error))

    def _suspects(self) -> set[TopicPartition]:
        """Asked without fruit for an interval, and still asked; a poll that hangs asks for all that were before it."""
        now = self._clock.now()
        hangs = self._waiting_since is not None and now - self._waiting_since >= self._stall_seconds
        return {
            tp
            for tp, since in self._fruitless_since.items()
            if now - since >= self._stall_seconds and (hangs or now - self._asked_at[tp] < self._stall_seconds)
        }
