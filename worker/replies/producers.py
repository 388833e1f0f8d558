"""Which producer a reply goes through: what a client names never stands in the way of the topics that are ours."""

from collections.abc import Callable

from worker.broker.api import Producer
from worker.renewing_producer import RenewingProducer

MAX_NAMED_TOPICS = 256


class ReplyProducers:
    """One producer for our own topics, and one, recycled after `max_named_topics`, for those that requests name: a
    topic that is slow, deleted or forbidden holds up only its own requests."""

    def __init__(
        self, make: Callable[[], Producer], own: frozenset[str], *, max_named_topics: int = MAX_NAMED_TOPICS
    ) -> None:
        self.own = RenewingProducer(make)
        self.named = RenewingProducer(make, max_topics=max_named_topics)
        self._own_topics = own

    def __repr__(self) -> str:
        return f"ReplyProducers(own={self.own!r}, named={self.named!r})"

    def of(self, topic: str) -> RenewingProducer:
        return self.own if topic in self._own_topics else self.named
