"""How to reach a Kafka cluster: addresses, security, time limits, and the mapping of its errors to ours."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiokafka import errors
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from worker.broker.api import (
    BrokerError,
    BrokerUnavailableError,
    CommitRejectedError,
    MessageTooLargeError,
    ProducerWedgedError,
    TopicNotAvailableError,
)
from worker.broker.kafka_security import KafkaSecurity

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KafkaConnection:
    """Everything the clients of one cluster have in common."""

    bootstrap_servers: str
    client_id: str = "v4flash"
    security: KafkaSecurity = field(default_factory=KafkaSecurity)
    max_message_bytes: int = 4 * 1024 * 1024 + 65_536
    session_timeout_seconds: float = 30.0
    heartbeat_interval_seconds: float = 3.0
    rebalance_timeout_seconds: float = 60.0
    max_poll_interval_seconds: float = 7 * 86_400.0  # intake stops polling on purpose; the watchdog sees one that hangs
    metadata_max_age_seconds: float = 30.0
    request_timeout_seconds: float = 15.0
    start_timeout_seconds: float = 60.0
    stop_timeout_seconds: float = 10.0

    def client_arguments(self) -> dict[str, Any]:
        """Arguments that every aiokafka client takes."""
        return {
            "bootstrap_servers": self.bootstrap_servers,
            "client_id": self.client_id,
            **self.security.client_arguments(),
            "request_timeout_ms": int(self.request_timeout_seconds * 1000),
            "metadata_max_age_ms": int(self.metadata_max_age_seconds * 1000),
        }


_MAPPING: tuple[tuple[tuple[type[BaseException], ...], type[BrokerError]], ...] = (
    ((errors.MessageSizeTooLargeError, errors.RecordListTooLargeError), MessageTooLargeError),
    (
        (
            errors.UnknownTopicOrPartitionError,
            errors.InvalidTopicError,
            errors.TopicAuthorizationFailedError,
        ),
        TopicNotAvailableError,
    ),
    (
        (
            errors.OutOfOrderSequenceNumber,
            errors.ProducerFenced,
            errors.InvalidProducerEpoch,
            errors.InvalidProducerIdMapping,
            errors.UnknownProducerId,
            errors.ProducerClosed,
        ),
        ProducerWedgedError,
    ),
    (
        (
            errors.CommitFailedError,
            errors.IllegalGenerationError,
            errors.UnknownMemberIdError,
            errors.RebalanceInProgressError,
            errors.IllegalStateError,
        ),
        CommitRejectedError,
    ),
    ((TimeoutError, OSError, errors.KafkaConnectionError, errors.KafkaTimeoutError), BrokerUnavailableError),
)


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Turn what aiokafka raises into our errors; anything of ours, and cancellation, passes."""
    try:
        yield
    except BrokerError:
        raise
    except Exception as error:  # aiokafka raises errors of its own, of sockets and of decoding; callers know only ours
        for kinds, ours in _MAPPING:
            if isinstance(error, kinds):
                raise ours(_words(error)) from error
        if getattr(error, "retriable", False):
            raise BrokerUnavailableError(_words(error)) from error
        raise BrokerError(f"{type(error).__name__}: {error}") from error


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "Kafka did not answer in time"
    return str(error) or type(error).__name__


async def starting(connection: KafkaConnection, start: Callable[[], Awaitable[None]]) -> None:
    """`start` of a client again while the cluster cannot be reached; raises BrokerUnavailableError that says where."""
    timeout = connection.start_timeout_seconds
    try:
        await retrying(start, timeout, timeout)
    except BrokerUnavailableError as error:
        told = f"no Kafka answers at {connection.bootstrap_servers} (`v4flash doctor kafka` says why)"
        raise BrokerUnavailableError(told) from error


async def retrying(call: Callable[[], Awaitable[T]], timeout_seconds: float, attempt_seconds: float) -> T:
    """`call` again with growing pauses while the broker cannot be reached; each attempt is bounded."""
    attempts = AsyncRetrying(
        stop=stop_after_delay(timeout_seconds),
        wait=wait_random_exponential(multiplier=0.1, max=2.0),
        retry=retry_if_exception_type(BrokerUnavailableError),
        reraise=True,
    )

    async def attempt() -> T:
        with mapped_errors():
            async with asyncio.timeout(attempt_seconds):
                return await call()

    return await attempts(attempt)


async def start_or_stop(
    start: Awaitable[object], stop: Callable[[], Awaitable[object]], timeout_seconds: float
) -> None:
    """Await `start`; where it fails or is cancelled, `stop`: a client has sockets and tasks before it has started."""
    try:
        await start
    except BaseException:  # a cancellation leaves them behind as well
        await stop_bounded(stop(), timeout_seconds)
        raise


async def stop_bounded(stop: Awaitable[object], timeout_seconds: float) -> None:
    """Await `stop`, at most so long; what it raises, a leaked cancellation too, stays here."""
    task = asyncio.ensure_future(stop)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_seconds)
    finally:
        if not task.done():
            task.cancel()
    if done and not task.cancelled():
        task.exception()
