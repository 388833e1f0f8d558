"""A producer that is replaced when it can never send again, and where asked after so many topics: Kafka's producers
never forget one. What was replaced finishes what it has on its way and is then stopped."""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from worker.broker.api import (
    BrokerError,
    BrokerUnavailableError,
    Headers,
    Producer,
    ProducerWedgedError,
    TopicPartition,
    UnacknowledgedError,
)

MAX_REPLACEMENTS = 5

log = structlog.get_logger(__name__)


class _Generation:
    """One producer of the broker, the topics it has met, and how many sends wait for it."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.topics: set[str] = set()
        self.num_sending = 0


class RenewingProducer:
    """See `worker.broker.api.Producer`. A send that meets a wedged producer raises ProducerWedgedError when the
    replacement runs (or could not be started yet): only the caller knows what has to be sent again. `run` stops what
    was replaced."""

    def __init__(self, make: Callable[[], Producer], *, max_topics: int | None = None) -> None:
        self._make = make
        self._max_topics = max_topics
        self._current: _Generation | None = None
        self._retired: set[_Generation] = set()
        self._idle = asyncio.Event()
        self._renewing = asyncio.Lock()

    def __repr__(self) -> str:
        topics = 0 if self._current is None else len(self._current.topics)
        return f"RenewingProducer(topics={topics}, retired={len(self._retired)})"

    async def start(self) -> None:
        self._current = await self._started()

    async def stop(self) -> None:
        generations = [*self._retired, *(() if self._current is None else (self._current,))]
        self._current = None
        self._retired.clear()
        await asyncio.gather(*(generation.producer.stop() for generation in generations))

    async def run(self) -> None:
        """Stop replaced producers when nothing is on its way through them any more, until cancelled."""
        while True:
            await self._idle.wait()
            self._idle.clear()
            for generation in [old for old in self._retired if not old.num_sending]:
                self._retired.discard(generation)
                with contextlib.suppress(BrokerError):
                    await generation.producer.stop()

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> TopicPartition:
        generation = self._running()
        if self._max_topics is not None and topic not in generation.topics:
            if len(generation.topics) >= self._max_topics:
                generation = await self._renewed(generation)
            generation.topics.add(topic)
        generation.num_sending += 1
        try:
            return await generation.producer.send(topic, value, key=key, headers=headers, partition=partition)
        except UnacknowledgedError:
            raise
        except ProducerWedgedError as error:
            log.warning("a producer is wedged and is replaced", topic=topic, error=str(error))
            await self._renewed(generation)
            raise
        finally:
            generation.num_sending -= 1
            if not generation.num_sending and generation in self._retired:
                self._idle.set()

    async def _renewed(self, old: _Generation) -> _Generation:
        """The producer after `old`; `old` itself while no other can be started."""
        async with self._renewing:
            if self._current is old:
                try:
                    fresh = await self._started()
                except BrokerError as error:
                    log.warning("no new producer yet", error=str(error))
                    return old
                if self._current is None:  # stopped meanwhile
                    await fresh.producer.stop()
                    raise BrokerUnavailableError("the producer is not running")
                self._current = fresh
                self._retired.add(old)
                if not old.num_sending:
                    self._idle.set()
            return self._running()

    async def _started(self) -> _Generation:
        generation = _Generation(self._make())
        await generation.producer.start()
        return generation

    def _running(self) -> _Generation:
        if self._current is None:
            raise BrokerUnavailableError("the producer is not running")
        return self._current


class ResendingProducer:
    """Sends a record again when the producer was replaced under it, for records of which a second copy is harmless."""

    def __init__(self, producer: RenewingProducer) -> None:
        self._producer = producer

    async def start(self) -> None:
        """The producer behind it is started by its owner."""

    async def stop(self) -> None:
        """The producer behind it is stopped by its owner."""

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> TopicPartition:
        for _ in range(MAX_REPLACEMENTS):
            try:
                return await self._producer.send(topic, value, key=key, headers=headers, partition=partition)
            except UnacknowledgedError as error:  # like a broker that is away: the caller knows how long to try
                raise BrokerUnavailableError(str(error)) from error
            except ProducerWedgedError:
                continue
        raise BrokerUnavailableError(f"{MAX_REPLACEMENTS} producers in a row could not send")
