"""Looks at a Kafka cluster as one principal sees it: who answers, what is configured, what is allowed. Changes nothing.

Rights are asked for with requests about a partition that no topic has: Kafka checks the right first, and answers
either that it is missing or that there is no such partition.
"""

from collections.abc import Collection, Mapping
from typing import Any

from aiokafka import errors
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.conn import create_conn
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.group import HeartbeatRequest
from aiokafka.protocol.produce import ProduceRequest

from worker.broker.api import BrokerError
from worker.broker.kafka_configs import node_config, topic_configs
from worker.broker.kafka_connection import KafkaConnection, mapped_errors, retrying, stop_bounded

NO_PARTITION = 2_000_000_000
PROBE_MS = 1000


class KafkaProbe:
    """Open between `start` and `stop`."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._client: Any = None

    async def unreachable(self) -> dict[str, str]:
        """Address -> why nobody there lets us in, in Kafka's or TLS's own words; addresses that do are left out."""
        refused = {}
        for address in self._connection.bootstrap_servers.split(","):
            host, _, port = address.strip().rpartition(":")
            arguments = self._connection.client_arguments()
            for not_wanted in ("bootstrap_servers", "metadata_max_age_ms"):
                arguments.pop(not_wanted)
            try:
                conn = await create_conn(host, int(port), **arguments)
            except (OSError, ValueError, TimeoutError, errors.KafkaError) as error:
                refused[address.strip()] = _words(error)
            else:
                conn.close()
        return refused

    async def start(self) -> None:
        """Raises BrokerUnavailableError at once."""
        self._client = AIOKafkaAdminClient(**self._connection.client_arguments())
        with mapped_errors():
            await self._client.start()

    async def stop(self) -> None:
        if self._client is not None:
            await stop_bounded(self._client.close(), self._connection.stop_timeout_seconds)

    async def partition_counts(self) -> dict[str, int]:
        """Of all topics that we may see."""
        with mapped_errors():
            topics = await self._client.describe_topics()
        return {topic["topic"]: len(topic["partitions"]) for topic in topics if topic["error_code"] == 0}

    async def topic_configs(self, topics: Collection[str]) -> dict[str, Mapping[str, str]]:
        """Settings by topic; those that we may not see are left out."""
        with mapped_errors():
            return await topic_configs(self._client, topics)

    async def broker_config(self) -> Mapping[str, str]:
        """Settings of one node; empty where we may not see them."""
        with mapped_errors():
            found = await self._client.describe_cluster()
            return await node_config(self._client, str(found["brokers"][0]["node_id"]))

    async def may_read(self, topic: str) -> bool:
        request = FetchRequest(PROBE_MS, 0, 1, 1, [(topic, [(NO_PARTITION, 0, 1)])])
        response = await self._send(request)
        return bool(response.topics[0][1][0][1] != errors.TopicAuthorizationFailedError.errno)

    async def may_write(self, topic: str) -> bool:
        response = await self._send(ProduceRequest(None, 1, PROBE_MS, [(topic, [(NO_PARTITION, b"")])]))
        return bool(response.topics[0][1][0][1] != errors.TopicAuthorizationFailedError.errno)

    async def may_join(self, group: str) -> bool:
        try:
            limit = self._connection.request_timeout_seconds  # a new cluster makes the topic of its groups first
            node = await retrying(lambda: self._client.find_coordinator(group), limit, limit)
        except BrokerError as error:
            if isinstance(error.__cause__, errors.GroupAuthorizationFailedError):
                return False
            raise
        with mapped_errors():
            response = await self._client._send_request(HeartbeatRequest(group, 0, "v4flash-doctor"), node)
        return bool(response.error_code != errors.GroupAuthorizationFailedError.errno)

    async def _send(self, request: Any) -> Any:
        with mapped_errors():
            return await self._client._send_request(request)  # the public calls have none for these


def _words(error: BaseException) -> str:
    words = str(getattr(error, "strerror", None) or error) or type(error).__name__
    return " ".join(words.split())
