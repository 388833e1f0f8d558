"""A runner that writes down what each step computed and when, so that work and loss can be told afterwards."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.batch import Layers, SampledRow, ScheduledBatch


@dataclass(slots=True)
class Step:
    """One batch. `num_new` bulk tokens were computed for the first time, `num_again` had been computed before."""

    began: float
    ended: float = 0.0
    seconds_inside: float = 0.0
    largest_bulk_chunk: int = 0
    num_new: int = 0
    num_again: int = 0
    num_urgent: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began - self.seconds_inside

    @property
    def urgent_seconds(self) -> float:
        """Its share that urgent rows are answerable for, by tokens."""
        return self.seconds * self.num_urgent / max(1, self.num_urgent + self.num_new + self.num_again)


@dataclass(slots=True)
class RecordingRunner:
    """A `ModelRunner` around another one. Requests whose id begins with "urgent" are urgent, all others bulk."""

    runner: Any
    clock: Callable[[], float] = time.monotonic
    steps: list[Step] = field(default_factory=list)
    _open: dict[int, Step] = field(default_factory=dict)
    _furthest: dict[str, int] = field(default_factory=dict)
    _last: Step | None = None

    def segments(self, batch: ScheduledBatch) -> Sequence[Layers]:
        return self.runner.segments(batch)  # type: ignore[no-any-return]

    def launch(self, batch: ScheduledBatch, layers: Layers) -> None:
        if not layers[0]:
            self._open[batch.batch_id] = self._begin(batch)
        self.runner.launch(batch, layers)
        self._last = self._open[batch.batch_id]

    def sample(self) -> None:
        self.runner.sample()

    def collect(self) -> list[SampledRow]:
        rows: list[SampledRow] = self.runner.collect()
        step = self._last
        assert step is not None
        step.ended = self.clock()
        self._open = {key: value for key, value in self._open.items() if value is not step}
        for parked in self._open.values():
            parked.seconds_inside += step.ended - step.began
        self.steps.append(step)
        return rows

    def _begin(self, batch: ScheduledBatch) -> Step:
        step = Step(self.clock())
        for row in batch.rows:
            count = len(row.token_ids)
            if row.request_id.startswith("urgent"):
                step.num_urgent += count
                continue
            step.largest_bulk_chunk = max(step.largest_bulk_chunk, count)
            again = max(0, min(count, self._furthest.get(row.request_id, 0) - row.start))
            step.num_again += again
            step.num_new += count - again
            self._furthest[row.request_id] = max(self._furthest.get(row.request_id, 0), row.start + count)
        return step


def work_between(steps: Sequence[Step], began: float, ended: float) -> dict[str, float]:
    """What the steps that ended in a span did: bulk tokens for each second that urgent rows did not take."""
    inside = [step for step in steps if began <= step.ended <= ended]
    urgent = sum(step.urgent_seconds for step in inside)
    new, again = sum(step.num_new for step in inside), sum(step.num_again for step in inside)
    return {
        "bulk_tokens_per_second": new / max(1e-9, ended - began - urgent),
        "tokens_per_second": (new + sum(step.num_urgent for step in inside)) / (ended - began),
        "recomputed_share": again / max(1, new + again),
        "urgent_seconds": urgent,
        "seconds": ended - began,
    }


def chunk_in_flight(steps: Sequence[Step], moment: float, least: int) -> bool:
    """Whether a step that ran at that moment had a bulk chunk of at least so many tokens."""
    return any(step.began <= moment < step.ended and step.largest_bulk_chunk >= least for step in steps)
