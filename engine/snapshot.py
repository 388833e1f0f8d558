"""What an engine tells of itself: its totals, and how full it is now."""

from engine.api import Decision, EngineStats
from engine.cache.manager import KVCacheManager
from engine.scheduler import Scheduler
from engine.totals import Totals


def snapshot(totals: Totals, cache: KVCacheManager, scheduler: Scheduler) -> EngineStats:
    """Between two steps, on the engine's thread."""
    pool = cache.pool
    return EngineStats(
        kv_utilisation=cache.utilisation,
        num_running=len(scheduler.on_device),
        num_waiting=len(scheduler.waiting) + len(scheduler.lane.waiting),
        num_in_lane=int(scheduler.lane.request is not None),
        num_waiting_for_lane=len(scheduler.lane.waiting),
        num_blocks=len(pool.blocks),
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        waiting_tokens=sum(r.num_tokens for r in (*scheduler.waiting, *scheduler.lane.waiting)),
        prompt_tokens_total=totals.prompt_tokens,
        generated_tokens_total=totals.generated_tokens,
        cached_prompt_tokens_total=totals.cached_tokens,
        loaded_prompt_tokens_total=totals.loaded_tokens,
        preemptions_total=scheduler.num_preemptions,
        evictions_total=pool.num_evictions,
        steps_total=totals.steps,
        celsius=None if scheduler.governor is None else scheduler.governor.celsius,
        interrupts_total=totals.interrupts,
        decisions={decision: scheduler.decisions[decision] for decision in Decision},
        step_error_seconds_total=scheduler.step_times.error_seconds_total,
        length_predictions_total=scheduler.lengths.num_predictions,
        length_error_tokens_total=scheduler.lengths.error_tokens_total,
        busy_seconds_total=totals.busy_seconds,
        prefill_seconds_total=totals.prefill_seconds,
        decode_seconds_total=totals.decode_seconds,
        cold=None if cache.cold is None else cache.cold.stats(),
    )
