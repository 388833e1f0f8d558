"""Every metric of the worker, declared once: base units, labels from bounded sets. Knows Prometheus and no Kafka."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from engine.api import EngineStats, PriorityClass
from worker.tier_metrics import TierCollector

_LATENCY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


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
        self._utilisation = gauge("kv_cache_utilisation_ratio", "KV blocks that cannot be reclaimed now, over all.")
        self._running = gauge("requests_running", "Requests in the batch.")
        self._waiting = gauge("requests_waiting", "Requests in the engine's queue.")
        self._tiers = TierCollector()
        registry.register(self._tiers)
        for cls in PriorityClass:
            for metric in (self._records, self._prompt_tokens, self._completion_tokens):
                metric.labels(cls.value)
            self._latency.labels(cls.value)
            self._first_token.labels(cls.value)

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
        self._completion_tokens.labels(cls.value).inc(completion_tokens)

    def error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def stream_timeout(self, cause: str) -> None:
        self._timeouts.labels(cause).inc()

    def dead_letter(self) -> None:
        self._dead_letters.inc()

    def observe_engine(self, stats: EngineStats) -> None:
        """Take over the gauges of the latest engine snapshot."""
        self._utilisation.set(stats.kv_utilisation)
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._tiers.stats = stats

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return bytes(generate_latest(self.registry))

    def names(self) -> Iterator[str]:
        """Names of the families, without suffixes."""
        return (family.name for family in self.registry.collect())
