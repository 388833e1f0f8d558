"""What one step runs: plain, picklable data from the scheduler to the runner."""

from dataclasses import dataclass, field

from engine.cache.block import BlockHash
from engine.request import Request
from engine.sampling_params import SamplingParams

Layers = tuple[int, int]
"""A segment of a step: the layers from the first number to before the second."""


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """`token_ids` of one request at positions start, start+1, ...; `sample` asks for the token after the last one.

    Blocks `cold_hashes` come before those of the table and lie on the SSD alone; such a row is alone in its step."""

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
    cold_hashes: tuple[BlockHash, ...] = ()

    @classmethod
    def of(cls, request: Request, num_new: int) -> "ScheduledRow":
        """The next `num_new` tokens of a running request that has the blocks for them."""
        start = request.num_computed_tokens
        assert request.tail_slot is not None, f"{request!r} runs without a tail slot"
        return cls(
            request_id=request.request_id,
            start=start,
            token_ids=request.tokens(start, start + num_new),
            block_table=[block.block_id for block in request.blocks],
            tail_slot=request.tail_slot,
            sample=start + num_new == request.num_tokens,
            params=request.params,
            choice=request.choice,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            cold_hashes=tuple(request.block_hashes[: request.num_cold_blocks]),
        )


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
    def is_streamed(self) -> bool:
        """Whether it is a step of a sequence that is larger than the KV memory."""
        return any(row.cold_hashes for row in self.rows)

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
