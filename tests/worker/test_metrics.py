"""What Prometheus sees."""

from engine.api import ColdStats, Decision, EngineStats, PriorityClass
from worker.metrics import Metrics


def test_a_finished_request_counts_once_under_its_class() -> None:
    """Counters, tokens and both histograms move together."""
    metrics = Metrics()
    metrics.request_finished(PriorityClass.URGENT, "stop", 1.5, 0.2, 10, 4)
    value = metrics.registry.get_sample_value
    assert value("v4flash_requests_total", {"class": "urgent", "reason": "stop"}) == 1
    assert value("v4flash_request_latency_seconds_sum", {"class": "urgent"}) == 1.5
    assert value("v4flash_time_to_first_token_seconds_count", {"class": "urgent"}) == 1
    assert value("v4flash_prompt_tokens_total", {"class": "urgent"}) == 10
    assert value("v4flash_completion_tokens_total", {"class": "urgent"}) == 4
    assert value("v4flash_completion_tokens_total", {"class": "bulk"}) == 0


def test_every_name_has_the_prefix_and_the_gauges_follow_the_engine() -> None:
    """One prefix; a snapshot replaces the one before."""
    metrics = Metrics()
    metrics.observe_engine(EngineStats(kv_utilisation=0.5, num_running=3, num_waiting=2))
    assert all(name.startswith("v4flash_") for name in metrics.names())
    assert metrics.registry.get_sample_value("v4flash_kv_cache_utilisation_ratio") == 0.5
    assert metrics.registry.get_sample_value("v4flash_requests_running") == 3


def test_tokens_count_by_the_tier_they_came_from_and_reads_by_their_time() -> None:
    """Memory, SSD and computed add up to the prompts; buckets of a histogram are cumulative."""
    metrics = Metrics()
    value = metrics.registry.get_sample_value
    assert value("v4flash_l3_cache_gate_decisions_total", {"decision": "recompute"}) == 0
    cold = ColdStats(
        read_bytes_total=4096,
        streamed_bytes_total=1024,
        read_seconds_total=0.5,
        read_latency_counts=(1, *(0,) * 11, 2),
        gate_decisions={"recompute": 3},
    )
    metrics.observe_engine(
        EngineStats(
            prompt_tokens_total=100,
            cached_prompt_tokens_total=60,
            loaded_prompt_tokens_total=20,
            num_in_lane=1,
            num_waiting_for_lane=2,
            cold=cold,
        )
    )
    assert value("v4flash_l3_cache_streamed_bytes_total") == 1024
    assert [value("v4flash_long_sequences", {"state": state}) for state in ("running", "waiting")] == [1, 2]
    tokens = {s: value("v4flash_kv_cache_prompt_tokens_total", {"source": s}) for s in ("l2", "l3", "computed")}
    assert tokens == {"l2": 40, "l3": 20, "computed": 40}
    assert value("v4flash_l3_cache_gate_decisions_total", {"decision": "recompute"}) == 3
    assert value("v4flash_l3_cache_moved_bytes_total", {"direction": "read"}) == 4096
    assert value("v4flash_l3_cache_read_seconds_bucket", {"le": "1.0"}) == 1
    assert value("v4flash_l3_cache_read_seconds_count") == 3


def test_counters_of_the_engine_grow_by_what_a_snapshot_adds() -> None:
    """Each snapshot counts once, however often it is seen; every decision has a series from the start."""
    metrics = Metrics()
    value = metrics.registry.get_sample_value
    assert value("v4flash_scheduler_decisions_total", {"decision": "squeezed_in"}) == 0
    stats = EngineStats(decisions={Decision.STARTED: 3}, busy_seconds_total=1.5, steps_total=4)
    for _ in range(2):
        metrics.observe_engine(stats)
    metrics.observe_engine(EngineStats(decisions={Decision.STARTED: 5}, busy_seconds_total=2.0, steps_total=6))
    assert value("v4flash_scheduler_decisions_total", {"decision": "started"}) == 5
    assert value("v4flash_engine_busy_seconds_total") == 2.0
    assert value("v4flash_engine_steps_total") == 6
