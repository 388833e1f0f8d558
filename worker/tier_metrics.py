"""What the tiers of the KV cache hold and move, from the engine's latest snapshot. All series are there at zero."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api import READ_LATENCY_BOUNDS, ColdStats, EngineStats

GATE_DECISIONS = ("load", "recompute", "shortage", "off")


class TierCollector(Collector):
    """`stats` is replaced by the worker; a scrape shows the last one."""

    def __init__(self) -> None:
        self.stats = EngineStats()

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        cold = stats.cold or ColdStats()
        in_memory = stats.cached_prompt_tokens_total - stats.loaded_prompt_tokens_total
        sources = {
            "l2": in_memory,
            "l3": stats.loaded_prompt_tokens_total,
            "computed": stats.prompt_tokens_total - stats.cached_prompt_tokens_total,
        }
        yield _counters("kv_cache_prompt_tokens", "Prompt tokens by where their KV came from.", "source", sources)
        evictions = {"l2": stats.evictions_total, "l3": cold.evictions_total}
        yield _counters("kv_cache_evictions", "Blocks that a tier gave up for others.", "tier", evictions)
        yield _gauge("l3_cache_blocks", "Blocks on the SSD.", cold.num_blocks)
        yield _gauge("l3_cache_used_bytes", "Bytes of its segment files.", cold.file_bytes)
        yield _gauge("l3_cache_capacity_bytes", "Bytes that they may take.", cold.capacity_bytes)
        yield _gauge("l3_cache_hung", "1 while a read is out for so long that no more are asked for.", cold.is_hung)
        moved = {
            "read": cold.read_bytes_total,
            "written": cold.written_bytes_total,
            "rewritten": cold.rewritten_bytes_total,
        }
        yield _counters("l3_cache_moved_bytes", "Bytes moved from and to the SSD.", "direction", moved)
        streamed = {"": cold.streamed_bytes_total}
        yield _counters("l3_cache_streamed_bytes", "Bytes read by steps of long sequences.", None, streamed)
        sequences = GaugeMetricFamily(
            "v4flash_long_sequences",
            "Sequences larger than the KV memory.",
            labels=["state"],
        )
        sequences.add_metric(["running"], float(stats.num_in_lane))
        sequences.add_metric(["waiting"], float(stats.num_waiting_for_lane))
        yield sequences
        yield _counters("l3_cache_loads", "Loads begun.", None, {"": cold.loads_total})
        yield _counters("l3_cache_late_loads", "Loads given up at their deadline.", None, {"": cold.late_loads_total})
        lost = {"corrupt": cold.corrupt_blocks_total, "missing": cold.missing_blocks_total}
        yield _counters("l3_cache_lost_blocks", "Blocks that could not be read back.", "reason", lost)
        refused = {"queue": cold.dropped_writes_total, "disk": cold.failed_writes_total}
        yield _counters("l3_cache_refused_writes", "Blocks that were not written.", "reason", refused)
        decisions = {decision: cold.gate_decisions.get(decision, 0) for decision in GATE_DECISIONS}
        yield _counters("l3_cache_gate_decisions", "What was decided for prefixes on the SSD.", "decision", decisions)
        latency = HistogramMetricFamily("v4flash_l3_cache_read_seconds", "Time to read one block.")
        latency.add_metric([], _cumulative(cold.read_latency_counts), sum_value=cold.read_seconds_total)
        yield latency


def _counters(name: str, text: str, label: str | None, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"v4flash_{name}", text, labels=[] if label is None else [label])
    for key, value in values.items():
        family.add_metric([] if label is None else [key], value)
    return family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"v4flash_{name}", text, value=float(value))


def _cumulative(counts: tuple[int, ...]) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip((*map(str, READ_LATENCY_BOUNDS), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
