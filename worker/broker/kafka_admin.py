"""Topics of a Kafka cluster: made, deleted, counted; committed offsets with their metadata."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from aiokafka import TopicPartition as KafkaTopicPartition
from aiokafka import errors
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as KafkaNewTopic

from worker.broker.api import BrokerUnavailableError, NewTopic, OffsetCommit, TopicPartition
from worker.broker.kafka_configs import topic_configs
from worker.broker.kafka_connection import (
    KafkaConnection,
    mapped_errors,
    retrying,
    start_or_stop,
    starting,
    stop_bounded,
)


class KafkaAdmin:
    """See `worker.broker.api.Admin`; every call is bounded and retried while the broker is away."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._client: Any = None

    async def start(self) -> None:
        async def attempt() -> None:
            client = AIOKafkaAdminClient(**self._connection.client_arguments())
            await start_or_stop(client.start(), client.close, self._connection.stop_timeout_seconds)
            self._client = client

        await starting(self._connection, attempt)

    async def stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await stop_bounded(client.close(), self._connection.stop_timeout_seconds)

    async def create_topics(self, topics: Sequence[NewTopic]) -> list[str]:
        if not topics:
            return []
        wanted = [KafkaNewTopic(t.name, t.num_partitions, 1, topic_configs=dict(t.config or {})) for t in topics]
        for topic in wanted:
            topic.replication_factor = -1  # the cluster's default, which the constructor refuses
        response = await self._call(lambda client: client.create_topics(wanted))
        created = []
        for name, code, *_ in response.topic_errors:
            if code == 0:
                created.append(name)
            elif code != errors.TopicAlreadyExistsError.errno:
                with mapped_errors():
                    raise errors.for_code(code)(name)
        return created

    async def delete_topics(self, names: Collection[str]) -> None:
        if names:
            await self._call(lambda client: client.delete_topics(list(names)))

    async def partition_counts(self, names: Collection[str] | None = None) -> dict[str, int]:
        # Always the whole list: asking for a name would create it where the broker auto-creates.
        topics = await self._call(lambda client: client.describe_topics())
        counts = {topic["topic"]: len(topic["partitions"]) for topic in topics if topic["error_code"] == 0}
        return counts if names is None else {name: counts[name] for name in names if name in counts}

    async def topic_configs(self, names: Collection[str]) -> dict[str, Mapping[str, str]]:
        return await self._call(lambda client: topic_configs(client, names))  # type: ignore[no-any-return]

    async def cluster_id(self) -> str:
        found = await self._call(lambda client: client.describe_cluster())
        return str(found.get("cluster_id") or "")

    async def committed(self, group: str, tps: Collection[TopicPartition]) -> dict[TopicPartition, OffsetCommit | None]:
        """What `group` has committed, with metadata, which aiokafka's consumer hides."""
        wanted = [KafkaTopicPartition(*tp) for tp in tps]

        async def ask(client: Any) -> Any:
            found = await client.list_consumer_group_offsets(group, partitions=wanted)
            if not found.keys() >= set(wanted):  # aiokafka drops an error of the whole group: a moved coordinator
                raise BrokerUnavailableError(f"the coordinator of group {group} does not tell what is committed")
            return found

        found = await self._call(ask)
        commits: dict[TopicPartition, OffsetCommit | None] = dict.fromkeys(tps)
        for tp, commit in found.items():
            if commit.offset >= 0:
                commits[TopicPartition(*tp)] = OffsetCommit(commit.offset, commit.metadata or "")
        return commits

    async def _call(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        if self._client is None:
            raise BrokerUnavailableError("the admin client is not running")
        timeout = self._connection.request_timeout_seconds
        return await retrying(lambda: call(self._client), timeout, timeout)
