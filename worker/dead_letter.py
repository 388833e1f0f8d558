"""Records that could not be served, kept whole on the dead-letter topic with the reason in headers."""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import structlog
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from worker.broker.api import (
    BrokerError,
    BrokerUnavailableError,
    Headers,
    MessageTooLargeError,
    Producer,
    Record,
    TopicPartition,
)

PREFIX = "__connect.errors."
SPRING_PREFIX = "kafka_dlt-"
DIGEST_HEADER = f"{PREFIX}value.sha256"
EVERY_TENANT = "*"
MAX_MESSAGE_CHARS = 1024
AGAIN_SECONDS = 1.0

log = structlog.get_logger(__name__)

Dialect = Literal["connect", "spring", "both"]
Values = Literal["keep", "digest"]


@dataclass(frozen=True, slots=True)
class DeadLetterPolicy:
    """In which dialects the reason is told, and of which tenants the values are kept (`*`: of all others)."""

    dialect: Dialect = "connect"
    values: Mapping[str, Values] = field(default_factory=dict)

    def keeps_value(self, tenant: str) -> bool:
        return self.values.get(tenant, self.values.get(EVERY_TENANT, "keep")) == "keep"


def without_reasons(headers: Headers) -> Headers:
    """The headers that the client sent: reasons of an earlier dead letter, in any dialect, are left out."""
    return tuple(header for header in headers if not header[0].startswith((PREFIX, SPRING_PREFIX)))


def dead_letter_headers(
    record: Record, exception_class: str, message: str, dialect: Dialect = "connect"
) -> tuple[tuple[str, bytes | None], ...]:
    """The record's headers, older ones of ours stripped, and ours once: Kafka Connect's as text, Spring's in binary."""
    message = message[:MAX_MESSAGE_CHARS]
    connect: dict[str, bytes] = {
        "topic": record.topic.encode(),
        "partition": b"%d" % record.partition,
        "offset": b"%d" % record.offset,
        "timestamp": b"%d" % record.timestamp_ms,
        "exception.class.name": exception_class.encode(),
        "exception.message": message.encode("utf-8", "replace"),
    }
    spring: dict[str, bytes] = {
        "original-topic": record.topic.encode(),
        "original-partition": record.partition.to_bytes(4, "big"),
        "original-offset": record.offset.to_bytes(8, "big"),
        "original-timestamp": record.timestamp_ms.to_bytes(8, "big", signed=True),
        "original-timestamp-type": b"LogAppendTime" if record.append_time else b"CreateTime",
        "exception-fqcn": exception_class.encode(),
        "exception-message": message.encode("utf-8", "replace"),
    }
    ours: list[tuple[str, bytes | None]] = []
    if dialect != "spring":
        ours += [(PREFIX + name, value) for name, value in connect.items()]
    if dialect != "connect":
        ours += [(SPRING_PREFIX + name, value) for name, value in spring.items()]
    return (*without_reasons(record.headers), *ours)


class DeadLetters:
    """Writes dead letters. One that the broker does not take in time makes its partition `stuck`, from which nothing
    more is to be taken, and is tried again until it is written; without `stuck` it raises BrokerError. Either way its
    prompt is not committed before."""

    def __init__(
        self,
        producer: Producer,
        topic: str,
        *,
        give_up_seconds: float,
        policy: DeadLetterPolicy | None = None,
        stuck: set[TopicPartition] | None = None,
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._give_up_seconds = give_up_seconds
        self._policy = policy or DeadLetterPolicy()
        self._stuck = stuck

    async def write(self, record: Record, exception_class: str, message: str, *, tenant: str = "") -> None:
        """Returns when acknowledged. A value that is too large, or not to be kept, is replaced by its digest in a
        header."""
        while True:
            try:
                await self._write(record, exception_class, message, tenant)
            except BrokerError as error:
                if self._stuck is None:
                    raise
                self._stuck.add(record.tp)
                log.warning("a dead letter finds no place", topic=self._topic, error=str(error) or type(error).__name__)
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                if self._stuck is not None:
                    self._stuck.discard(record.tp)
                return

    async def _write(self, record: Record, exception_class: str, message: str, tenant: str) -> None:
        headers = dead_letter_headers(record, exception_class, message, self._policy.dialect)
        digest = hashlib.sha256(record.value or b"").hexdigest().encode()
        without = (*headers, (DIGEST_HEADER, digest))
        if record.value is not None and not self._policy.keeps_value(tenant):
            await self._send(record.key, None, without)
            return
        try:
            await self._send(record.key, record.value, headers)
        except MessageTooLargeError:
            await self._send(record.key, None, without)

    async def _send(self, key: bytes | None, value: bytes | None, headers: Headers) -> None:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, BrokerUnavailableError)),
            stop=stop_after_delay(self._give_up_seconds),
            wait=wait_random_exponential(multiplier=0.05, max=2.0),
            reraise=True,
        ):
            with attempt:
                await self._producer.send(self._topic, value, key=key, headers=headers)
