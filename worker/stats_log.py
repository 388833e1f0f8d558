"""The engine's figures as a log line now and then, for those who read logs and no metrics."""

import structlog

from engine.api import EngineStats

EVERY_SECONDS = 10.0

log = structlog.get_logger(__name__)


class StatsLog:
    """A line each `every_seconds` with what happened since the one before; silent while nothing happens."""

    def __init__(self, *, every_seconds: float = EVERY_SECONDS) -> None:
        self._every = every_seconds
        self._last: tuple[EngineStats, float] | None = None

    def seen(self, stats: EngineStats, now: float) -> None:
        """Take a snapshot of `now` (monotonic seconds)."""
        if self._last is None:
            self._last = stats, now
            return
        before, then = self._last
        if (seconds := now - then) < self._every:
            return
        self._last = stats, now
        if stats != before:
            log.info(
                "engine",
                requests_running=stats.num_running,
                requests_waiting=stats.num_waiting,
                prompt_tokens_per_second=round((stats.prompt_tokens_total - before.prompt_tokens_total) / seconds, 1),
                generated_tokens_per_second=round(
                    (stats.generated_tokens_total - before.generated_tokens_total) / seconds, 1
                ),
                kv_utilisation=round(stats.kv_utilisation, 3),
                cached_prompt_tokens=stats.cached_prompt_tokens_total - before.cached_prompt_tokens_total,
                preemptions=stats.preemptions_total - before.preemptions_total,
            )
