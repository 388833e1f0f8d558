"""How much of a worker one tenant may take at once. A pure decision; knows neither Kafka nor jobs."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from worker.dead_letter import EVERY_TENANT
from worker.ended import RateLimited

TOPIC_SECONDS = 3600.0
RETRY_SECONDS = 1.0
MAX_TENANTS = 10_000


class TenantQuota(BaseModel):
    """Limits of one tenant in one worker; None is unbounded. A burst is one second's worth of requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    concurrent_tokens: Annotated[int, Field(ge=1)] | None = None
    requests_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    reply_topics: Annotated[int, Field(ge=0)] | None = None


class _Taken:
    """What one tenant has taken."""

    __slots__ = ("num_requests", "num_tokens", "since", "topics")

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_requests = 0.0
        self.since = 0.0
        self.topics: OrderedDict[str, float] = OrderedDict()


class Quotas:
    """Counts by tenant; `*` is the quota of each tenant that has none of its own. All times are monotonic seconds."""

    def __init__(self, quotas: Mapping[str, TenantQuota]) -> None:
        self._quotas = quotas
        self._taken: OrderedDict[str, _Taken] = OrderedDict()

    def request(self, tenant: str, now: float) -> None:
        """One more request. Raises RateLimited."""
        rate = self._quota(tenant).requests_per_second
        if rate is None:
            return
        taken = self._of(tenant)
        left = max(0.0, taken.num_requests - (now - taken.since) * rate)
        burst = max(1.0, rate)
        if left + 1 > burst:
            raise RateLimited("requests_per_second", retry_after_seconds=(left + 1 - burst) / rate)
        taken.num_requests, taken.since = left + 1, now

    def reply_topic(self, tenant: str, topic: str, now: float) -> None:
        """A request names a reply topic. Raises RateLimited for one that is new and too many."""
        most = self._quota(tenant).reply_topics
        if most is None:
            return
        topics = self._of(tenant).topics
        while topics and now - next(iter(topics.values())) >= TOPIC_SECONDS:
            topics.popitem(last=False)
        if topic not in topics and len(topics) >= most:
            oldest = next(iter(topics.values()), None)
            after = None if oldest is None else oldest + TOPIC_SECONDS - now
            raise RateLimited("reply_topics", retry_after_seconds=after)
        topics[topic] = now
        topics.move_to_end(topic)

    @contextmanager
    def tokens(self, tenant: str, num_tokens: int) -> Iterator[None]:
        """While a request runs: its prompt and longest answer. Raises RateLimited before it begins."""
        most = self._quota(tenant).concurrent_tokens
        if most is None:
            yield
            return
        if num_tokens > most:
            raise RateLimited("concurrent_tokens", retry_after_seconds=None)
        taken = self._of(tenant)
        if taken.num_tokens + num_tokens > most:
            raise RateLimited("concurrent_tokens", retry_after_seconds=RETRY_SECONDS)
        taken.num_tokens += num_tokens
        try:
            yield
        finally:
            taken.num_tokens -= num_tokens

    def _quota(self, tenant: str) -> TenantQuota:
        return self._quotas.get(tenant) or self._quotas.get(EVERY_TENANT) or _UNBOUNDED

    def _of(self, tenant: str) -> _Taken:
        taken = self._taken.setdefault(tenant, _Taken())
        self._taken.move_to_end(tenant)
        if len(self._taken) > MAX_TENANTS:  # a trusted header may name ever new ones; those that run are kept
            idle = next((name for name, old in self._taken.items() if old.num_tokens == 0 and name != tenant), None)
            if idle is not None:
                del self._taken[idle]
        return taken


_UNBOUNDED = TenantQuota()
