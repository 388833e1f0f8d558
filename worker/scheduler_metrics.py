"""What the scheduler decides, how good its guesses are and how busy the engine is, from its latest snapshot."""

import math
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api import Decision, EngineStats


class SchedulerCollector(Collector):
    """`stats` is replaced by the worker; a scrape shows the last one. All series are there at zero."""

    def __init__(self) -> None:
        self.stats = EngineStats()

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        decisions = CounterMetricFamily(
            "v4flash_scheduler_decisions", "What the scheduler decided about requests.", labels=["decision"]
        )
        for decision in Decision:
            decisions.add_metric([decision.value], stats.decisions.get(decision, 0))
        yield decisions
        celsius = math.nan if stats.celsius is None else stats.celsius
        text = "Temperature that the thermal governor goes by; NaN without a sensor."
        yield GaugeMetricFamily("v4flash_device_temperature_celsius", text, value=celsius)
        for name, text, value in (
            ("engine_steps", "Steps of the engine.", stats.steps_total),
            ("engine_busy_seconds", "Seconds in steps; its rate is the busy ratio.", stats.busy_seconds_total),
            (
                "step_prediction_error_seconds",
                "How far predicted step times were off.",
                stats.step_error_seconds_total,
            ),
            ("length_predictions", "Answers whose length had been predicted.", stats.length_predictions_total),
            ("length_prediction_error_tokens", "How far they were off.", stats.length_error_tokens_total),
        ):
            yield CounterMetricFamily(f"v4flash_{name}", text, value=value)
