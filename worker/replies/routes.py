"""Where the replies of a request go: the topic it names, the shared topic, or a topic of its own made on demand."""

import asyncio
from collections.abc import Callable, Collection

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from topics.headers import RequestHeaders
from topics.names import TopicNames, refused_reply_topic, validate_reply_topic
from topics.routes import Route
from worker.broker.api import Admin, BrokerError, BrokerUnavailableError, NewTopic, Record
from worker.clock import Clock
from worker.replies.api import Destination, ReplyUndeliverable

MAX_KNOWN_TOPICS = 10_000
EVERY_TOPIC = "*"
KNOWN_SECONDS = 30.0  # a topic may be deleted, or get more partitions
PER_REQUEST_CONFIG = {"retention.ms": "3600000", "segment.ms": "600000", "cleanup.policy": "delete"}


class ReplyRoutes:
    """Resolves destinations; existence and partition counts come from the admin client and are remembered."""

    def __init__(
        self,
        admin: Admin,
        names: TopicNames,
        *,
        allowed_prefixes: Collection[str],
        forbidden: frozenset[str],
        carries_prompts: Callable[[str], bool] = lambda topic: False,
        clock: Clock,
        give_up_seconds: float,
    ) -> None:
        self._admin = admin
        self._names = names
        self._allowed = tuple(allowed_prefixes)
        self._forbidden = forbidden
        self._carries_prompts = carries_prompts
        self._clock = clock
        self._give_up_seconds = give_up_seconds
        self._partitions: dict[str, int] = {}
        self._learned_at: dict[str, float] = {}

    def default(self, record: Record, headers: RequestHeaders, route: Route, request_id: str) -> Destination:
        """The route's output topic or the shared one: where errors go whose own reply topic is not to be trusted."""
        topic = route.output_topic or self._names.replies
        return Destination(topic, record.key or headers.correlation_id or request_id.encode("utf-8", "replace"))

    async def resolve(
        self,
        record: Record,
        headers: RequestHeaders,
        route: Route,
        request_id: str,
        *,
        tenant: str = "",
        claim: Callable[[str], None] = lambda topic: None,
    ) -> Destination:
        """`claim` is told of a topic that is not ours before anything is done with it, and may raise. Raises
        InvalidMessage (`invalid_reply_topic`) for what may not be written or is not there, and ReplyUndeliverable
        when the broker does not say, or refuses to make the topic."""
        default = self.default(record, headers, route, request_id)
        header = headers.reply_topic_header
        if headers.reply_topic is None or header is None:
            return default
        allowed = (EVERY_TOPIC,) if route.reply_prefixes else self._allowed
        topic = validate_reply_topic(
            headers.reply_topic, header=header, allowed_prefixes=allowed, forbidden=self._forbidden
        )
        if route.reply_prefixes and not route.allows_reply_to(topic, tenant):
            raise refused_reply_topic(header, "is outside the allowed prefixes")
        if self._carries_prompts(topic):
            raise refused_reply_topic(header, "must not carry prompts: the worker would answer itself")
        if topic not in (self._names.replies, default.topic):
            claim(topic)
        count = await self._looked_up(topic, may_create=topic == self._names.reply_for(request_id))
        if count is None:
            raise refused_reply_topic(header, "does not exist")
        self._remember(topic, count)
        if headers.reply_partition is not None and headers.reply_partition >= count:
            raise refused_reply_topic(headers.reply_partition_header or header, f"has only {count} partitions")
        return Destination(topic, default.key, headers.reply_partition)

    async def _looked_up(self, topic: str, *, may_create: bool) -> int | None:
        """Number of partitions, None where there is no such topic."""
        if topic in self._partitions and self._clock.now() - self._learned_at[topic] < KNOWN_SECONDS:
            return self._partitions[topic]
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(BrokerUnavailableError),
            stop=stop_after_delay(self._give_up_seconds),
            wait=wait_random_exponential(multiplier=0.05, max=2.0),
            reraise=True,
        )
        try:
            async with asyncio.timeout(self._give_up_seconds):
                return await attempts(self._ask, topic, may_create)
        except (BrokerError, TimeoutError) as error:
            raise ReplyUndeliverable(f"no look-up of the reply topic: {error or type(error).__name__}") from error

    async def _ask(self, topic: str, may_create: bool) -> int | None:
        count = (await self._admin.partition_counts([topic])).get(topic)
        if count is None and may_create:
            await self._admin.create_topics([NewTopic(topic, 1, PER_REQUEST_CONFIG)])
            return 1
        return count

    def _remember(self, topic: str, count: int) -> None:
        if len(self._partitions) >= MAX_KNOWN_TOPICS:
            self._partitions.clear()
            self._learned_at.clear()
        if topic not in self._partitions or self._clock.now() - self._learned_at[topic] >= KNOWN_SECONDS:
            self._learned_at[topic] = self._clock.now()
        self._partitions[topic] = count
