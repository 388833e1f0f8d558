"""Where the replies of a request go: the topic it names, the shared topic, or a topic of its own made on demand."""

from collections.abc import Collection

from topics.errors import ErrorCode, InvalidMessage
from topics.headers import RequestHeaders
from topics.names import TopicNames, validate_reply_topic
from topics.routes import Route
from worker.broker.api import Admin, NewTopic, Record
from worker.replies.api import Destination

MAX_KNOWN_TOPICS = 10_000
PER_REQUEST_CONFIG = {"retention.ms": "3600000", "segment.ms": "600000", "cleanup.policy": "delete"}


class ReplyRoutes:
    """Resolves destinations; existence and partition counts come from the admin client and are remembered."""

    def __init__(
        self, admin: Admin, names: TopicNames, *, allowed_prefixes: Collection[str], forbidden: frozenset[str]
    ) -> None:
        self._admin = admin
        self._names = names
        self._allowed = tuple(allowed_prefixes)
        self._forbidden = forbidden
        self._partitions: dict[str, int] = {}

    def default(self, record: Record, headers: RequestHeaders, route: Route, request_id: str) -> Destination:
        """The route's output topic or the shared one: where errors go whose own reply topic is not to be trusted."""
        topic = route.output_topic or self._names.replies
        return Destination(topic, record.key or headers.correlation_id or request_id.encode("utf-8", "replace"))

    async def resolve(self, record: Record, headers: RequestHeaders, route: Route, request_id: str) -> Destination:
        """Raises InvalidMessage (`invalid_reply_topic`) for what may not be written or is not there."""
        default = self.default(record, headers, route, request_id)
        if headers.reply_topic is None:
            return default
        topic = validate_reply_topic(headers.reply_topic, allowed_prefixes=self._allowed, forbidden=self._forbidden)
        count = await self._num_partitions(topic)
        if count is None and topic == self._names.reply_for(request_id):
            await self._admin.create_topics([NewTopic(topic, 1, PER_REQUEST_CONFIG)])
            count = 1
        if count is None:
            raise InvalidMessage(ErrorCode.INVALID_REPLY_TOPIC, "reply topic does not exist", "reply topic")
        self._remember(topic, count)
        if headers.reply_partition is not None and headers.reply_partition >= count:
            raise InvalidMessage(
                ErrorCode.INVALID_REPLY_TOPIC, f"reply topic has only {count} partitions", "reply partition"
            )
        return Destination(topic, default.key, headers.reply_partition)

    async def _num_partitions(self, topic: str) -> int | None:
        if topic in self._partitions:
            return self._partitions[topic]
        return (await self._admin.partition_counts([topic])).get(topic)

    def _remember(self, topic: str, count: int) -> None:
        if len(self._partitions) >= MAX_KNOWN_TOPICS:
            self._partitions.clear()
        self._partitions[topic] = count
