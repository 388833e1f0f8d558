"""Every metric of the worker, declared once: base units, labels from bounded sets. Knows Prometheus and no Kafka."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from engine.api import EngineStats, PriorityClass
from worker.partition_backlog import PartitionBacklog
from worker.scheduler_metrics import SchedulerCollector
from worker.tier_metrics import TierCollector

_LATENCY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PROMPT_TOKENS_BUCKETS = tuple(float(1 << power) for power in range(4, 18))
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

MAX_PARTITIONS = 512
"""With more than three series each, a scrape would cost more than it tells."""


class Metrics:
    """Counts into `registry`, by default one of its own. All series of a class exist from the start, at zero."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = registry or CollectorRegistry()
        by_class = ["class"]

        def counter(name: str, text: str, labels: list[str] | None = None) -> Counter:
            return Counter(f"v4flash_{name}", text, labels or [], registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"v4flash_{name}", text, registry=registry)

        self._records = counter("records_polled", "Prompt records taken from the broker.", by_class)
        how = "Requests that ended, by finish reason, error code, or how else."
        self._requests = counter("requests", how, ["class", "reason"])
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests.", by_class)
        self._completion_tokens = counter("completion_tokens", "Generated tokens of ended requests.", by_class)
        self._errors = counter("errors", "Errors by code.", ["code"])
        self._timeouts = counter("streaming_timeout", "Streams that stalled, by cause.", ["cause"])
        self._dead_letters = counter("dead_letters", "Records copied to the dead-letter topic.")
        self._latency = Histogram(
            "v4flash_request_latency_seconds",
            "From taking a record to its terminal reply.",
            by_class,
            registry=registry,
            buckets=_LATENCY_BUCKETS,
        )
        self._first_token = Histogram(
            "v4flash_time_to_first_token_seconds",
            "From taking a record to its first token.",
            by_class,
            registry=registry,
            buckets=_FIRST_TOKEN_BUCKETS,
        )
        self._prompt_length = Histogram(
            "v4flash_prompt_length_tokens",
            "Prompt tokens of an ended request.",
            by_class,
            registry=registry,
            buckets=_PROMPT_TOKENS_BUCKETS,
        )
        self._utilisation = gauge("kv_cache_utilisation_ratio", "KV blocks that cannot be reclaimed now, over all.")
        self._running = gauge("requests_running", "Requests in the batch.")
        self._waiting = gauge("requests_waiting", "Requests in the engine's queue.")
        self._tiers = TierCollector()
        registry.register(self._tiers)
        of_partition = ["topic", "partition"]

        def by_partition(name: str, text: str) -> Gauge:
            return Gauge(f"v4flash_partition_{name}", text, of_partition, registry=registry)

        age = "Age of the oldest prompt without an answer, in partitions of this worker."
        self._oldest = by_partition("oldest_unfinished_seconds", age)
        self._backlog = by_partition("backlog_tokens", "Tokens of prompts without an answer, estimated from bytes.")
        loss = "Until retention drops the oldest prompt without an answer; absent where nothing can be lost."
        self._loss = by_partition("seconds_to_retention_loss", loss)
        self._scheduler = SchedulerCollector()
        registry.register(self._scheduler)
        for cls in PriorityClass:
            for metric in (self._records, self._prompt_tokens, self._completion_tokens):
                metric.labels(cls.value)
            self._latency.labels(cls.value)
            self._first_token.labels(cls.value)
            self._prompt_length.labels(cls.value)

    def record_polled(self, cls: PriorityClass) -> None:
        self._records.labels(cls.value).inc()

    def request_finished(
        self,
        cls: PriorityClass,
        reason: str,
        seconds: float,
        first_token_seconds: float | None,
        prompt_tokens: int,
        completion_tokens: int,
    ) -> None:
        self._requests.labels(cls.value, reason).inc()
        self._latency.labels(cls.value).observe(seconds)
        if first_token_seconds is not None:
            self._first_token.labels(cls.value).observe(first_token_seconds)
        self._prompt_tokens.labels(cls.value).inc(prompt_tokens)
        self._prompt_length.labels(cls.value).observe(prompt_tokens)
        self._completion_tokens.labels(cls.value).inc(completion_tokens)

    def error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def stream_timeout(self, cause: str) -> None:
        self._timeouts.labels(cause).inc()

    def dead_letter(self) -> None:
        self._dead_letters.inc()

    def observe_engine(self, stats: EngineStats) -> None:
        """Take over the latest engine snapshot."""
        self._utilisation.set(stats.kv_utilisation)
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._tiers.stats = self._scheduler.stats = stats

    def observe_backlog(self, partitions: Sequence[PartitionBacklog]) -> None:
        """Replace the figures of all partitions; at most `MAX_PARTITIONS` are told, those with the oldest prompts."""
        shown = sorted(partitions, key=lambda one: one.oldest_seconds, reverse=True)[:MAX_PARTITIONS]
        for gauge in (self._oldest, self._backlog, self._loss):
            gauge.clear()
        for one in shown:
            labels = (one.tp.topic, str(one.tp.partition))
            self._oldest.labels(*labels).set(one.oldest_seconds)
            self._backlog.labels(*labels).set(one.tokens)
            if one.seconds_to_loss is not None:
                self._loss.labels(*labels).set(one.seconds_to_loss)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return bytes(generate_latest(self.registry))

    def names(self) -> Iterator[str]:
        """Names of the families, without suffixes."""
        return (family.name for family in self.registry.collect())
