"""What one step runs: plain, picklable data from the scheduler to the runner."""

from dataclasses import dataclass, field

from engine.sampling_params import SamplingParams

Layers = tuple[int, int]
"""A segment of a step: the layers from the first number to before the second."""


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """`token_ids` of one request at positions start, start+1, ...; `sample` asks for the token after the last one."""

    request_id: str
    start: int
    token_ids: list[int]
    block_table: list[int]
    tail_slot: int
    sample: bool
    params: SamplingParams
    choice: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """Rows of one step; order matters, since a row may read blocks that an earlier row writes. `batch_id` tells the
    batches apart that are on the device at one time."""

    rows: list[ScheduledRow] = field(default_factory=list)
    batch_id: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows if len(row.token_ids) > 1)


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One chosen token, or the error that ends this request alone. `top` are (token id, log probability)."""

    request_id: str
    token_id: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None
