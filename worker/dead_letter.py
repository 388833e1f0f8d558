"""Records that could not be served, kept whole on the dead-letter topic with the reason in headers."""

import hashlib

from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from worker.broker.api import BrokerUnavailableError, Headers, MessageTooLargeError, Producer, Record

PREFIX = "__connect.errors."
DIGEST_HEADER = f"{PREFIX}value.sha256"


def dead_letter_headers(record: Record, exception_class: str, message: str) -> Headers:
    """The record's headers, older ones of ours stripped, and ours once (Kafka Connect's text dialect)."""
    kept = tuple(header for header in record.headers if not header[0].startswith(PREFIX))
    ours = {
        "topic": record.topic,
        "partition": str(record.partition),
        "offset": str(record.offset),
        "timestamp": str(record.timestamp_ms),
        "exception.class.name": exception_class,
        "exception.message": message,
    }
    return (*kept, *((PREFIX + name, value.encode("utf-8", "replace")) for name, value in ours.items()))


class DeadLetters:
    """Writes dead letters. One that does not arrive in time raises BrokerError: its prompt must not be committed."""

    def __init__(self, producer: Producer, topic: str, *, give_up_seconds: float) -> None:
        self._producer = producer
        self._topic = topic
        self._give_up_seconds = give_up_seconds

    async def write(self, record: Record, exception_class: str, message: str) -> None:
        """Returns when acknowledged. A value that is too large is replaced by its digest in a header."""
        headers = dead_letter_headers(record, exception_class, message)
        try:
            await self._send(record.key, record.value, headers)
        except MessageTooLargeError:
            digest = hashlib.sha256(record.value or b"").hexdigest().encode()
            await self._send(record.key, None, (*headers, (DIGEST_HEADER, digest)))

    async def _send(self, key: bytes | None, value: bytes | None, headers: Headers) -> None:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, BrokerUnavailableError)),
            stop=stop_after_delay(self._give_up_seconds),
            wait=wait_random_exponential(multiplier=0.05, max=2.0),
            reraise=True,
        ):
            with attempt:
                await self._producer.send(self._topic, value, key=key, headers=headers)
