"""A client for benchmarks: sends prompts to a real Kafka at once and follows the shared reply topic.

It uses the Kafka client library bare, so that what it costs is small and is not the worker's.
"""

import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from topics.attempts import AttemptReader, AttemptState
from topics.names import TopicNames
from worker.broker.kafka import KafkaBroker, KafkaConnection
from worker.provision import DEFAULT_PARTITIONS, create_topics, topics_of


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt record."""

    request_id: str
    operation: str
    mode: str
    body: dict[str, Any]
    priority: str = "standard"


@dataclass(slots=True)
class Reply:
    """The records that came for one prompt, read only after the clock has stopped. Times are Unix seconds."""

    records: list[Any] = field(default_factory=list)
    received: list[float] = field(default_factory=list)
    num_terminal: int = 0

    def take(self, record: Any) -> None:
        self.records.append(record)
        self.received.append(time.time())
        self.num_terminal += ("x-final", b"1") in record.headers

    @property
    def appended(self) -> list[float]:
        """When the broker had each record."""
        return [record.timestamp / 1000 for record in self.records]

    def answer(self) -> tuple[str, dict[str, Any]]:
        """Text and usage by the attempt rule; raises AssertionError unless the answer is there, whole and once."""
        reader = AttemptReader()
        for record in self.records:
            reader.feed(tuple(record.headers), record.value, record.offset)
        assert reader.state is AttemptState.COMPLETE, (reader.state, reader.error)
        assert self.num_terminal == 1, f"{self.num_terminal} terminal records"
        return reader.text, dict(reader.usage or {})


class LoadClient:
    """One producer, and one reader of all partitions of the reply topic from where it ends at the start."""

    def __init__(self, bootstrap: str, names: TopicNames) -> None:
        self._names = names
        self._producer = AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=2)
        self._consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False)

    async def __aenter__(self) -> "LoadClient":
        await self._producer.start()
        await self._consumer.start()
        self._consumer.assign([TopicPartition(self._names.replies, i) for i in range(DEFAULT_PARTITIONS)])
        await self._consumer.seek_to_end()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._producer.stop()
        await self._consumer.stop()

    async def send(self, asks: Sequence[Ask]) -> None:
        """Returns when the broker has all of them."""
        sent = []
        for ask in asks:
            key = ask.request_id.encode()
            headers = [("x-request-id", key), ("x-operation", ask.operation.encode())]
            headers.append(("x-reply-mode", ask.mode.encode()))
            topic, value = self._names.prompts(ask.priority), json.dumps(ask.body).encode()
            sent.append(await self._producer.send(topic, value, key=key, headers=headers))
        for future in sent:
            await future

    async def follow(self, asks: Sequence[Ask]) -> dict[str, Reply]:
        """Returns when each prompt has its terminal record; by request id."""
        replies = {ask.request_id: Reply() for ask in asks}
        open_ids = set(replies)
        while open_ids:
            for request_id, record in _by_request(await self._consumer.getmany(timeout_ms=1000)):
                if request_id in replies:
                    replies[request_id].take(record)
                    if replies[request_id].num_terminal:
                        open_ids.discard(request_id)
        return replies

    async def records(self) -> AsyncIterator[tuple[str, Any]]:
        """All records of the reply topic as they come, with their request id."""
        while True:
            for pair in _by_request(await self._consumer.getmany(timeout_ms=1000)):
                yield pair


async def make_topics(bootstrap: str, names: TopicNames) -> None:
    broker = KafkaBroker(KafkaConnection(bootstrap))
    await create_topics(broker.admin(), topics_of(names, max_body_bytes=4 << 20))


def _by_request(batches: dict[Any, list[Any]]) -> Iterator[tuple[str, Any]]:
    for records in batches.values():
        for record in records:
            yield dict(record.headers).get("x-request-id", b"").decode(), record
