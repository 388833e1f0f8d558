"""The idempotent producer on Kafka. It never lets aiokafka see a topic or partition that does not exist."""

import asyncio
import time
from typing import Any

from aiokafka import AIOKafkaProducer

from worker.broker.api import (
    BrokerError,
    BrokerUnavailableError,
    Headers,
    ProducerWedgedError,
    TopicNotAvailableError,
    TopicPartition,
    UnacknowledgedError,
)
from worker.broker.kafka_admin import KafkaAdmin
from worker.broker.kafka_connection import KafkaConnection, mapped_errors, start_or_stop, starting, stop_bounded


class KafkaProducer:
    """See `worker.broker.api.Producer`. Once wedged it refuses every send at once."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._admin = KafkaAdmin(connection)
        self._client: Any = None
        self._wedged = False
        self._counts: dict[str, int] = {}
        self._counted_at = 0.0
        self._counting = asyncio.Lock()

    async def start(self) -> None:
        async def attempt() -> None:
            client = AIOKafkaProducer(
                **self._connection.client_arguments(),
                enable_idempotence=True,
                acks="all",
                max_request_size=self._connection.max_message_bytes,
            )
            await start_or_stop(client.start(), client.stop, self._connection.stop_timeout_seconds)
            self._client = client

        await self._admin.start()
        await starting(self._connection, attempt)

    async def stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await stop_bounded(client.stop(), self._connection.stop_timeout_seconds)
        await self._admin.stop()

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> TopicPartition:
        if self._wedged:
            raise ProducerWedgedError("this producer can never send again")
        if self._client is None:
            raise BrokerUnavailableError("the producer is not running")
        num_partitions = await self._num_partitions(topic)
        if partition is not None and not 0 <= partition < num_partitions:
            raise TopicNotAvailableError(f"there is no {topic}[{partition}]")
        limit, accepted = asyncio.timeout(2 * self._connection.request_timeout_seconds), False
        try:
            with mapped_errors():
                async with limit:
                    acknowledged = await self._client.send(
                        topic, value, key=key, partition=partition, headers=list(headers)
                    )
                    accepted = True
                    sent = await acknowledged
        except ProducerWedgedError:
            self._wedged = True
            raise
        except BrokerError as error:
            if self._client is not None and self._is_dead(self._client):
                self._wedged = True
                raise ProducerWedgedError(str(error)) from error
            if isinstance(error, BrokerUnavailableError | TopicNotAvailableError):
                self._counts.pop(topic, None)  # it may have been deleted
            if accepted and limit.expired():  # aiokafka goes on with it: sent again, it would be there twice
                raise UnacknowledgedError("Kafka has not acknowledged in time") from error
            raise
        return TopicPartition(sent.topic, sent.partition)

    @staticmethod
    def _is_dead(client: Any) -> bool:
        """Whether aiokafka's sender has ended; it says so to nobody, and every later send fails or waits for ever."""
        task = client._sender.sender_task
        return task is not None and task.done()

    async def _num_partitions(self, topic: str) -> int:
        async with self._counting:
            fresh = time.monotonic() - self._counted_at < self._connection.metadata_max_age_seconds
            if topic not in self._counts or not fresh:
                self._counts = await self._admin.partition_counts()
                self._counted_at = time.monotonic()
        if topic not in self._counts:
            raise TopicNotAvailableError(f"there is no topic {topic}")
        return self._counts[topic]
