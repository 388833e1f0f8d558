"""One sequence inside the engine: its tokens, its blocks, its state. Decisions about it are made elsewhere."""

from dataclasses import dataclass, field
from enum import Enum

from engine.api import FinishReason, PriorityClass
from engine.cache.block import Block, BlockHash
from engine.sampling_params import SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    LOADING = "loading"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_S = RequestStatus
ARROWS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: frozenset({_S.RUNNING, _S.LOADING, _S.FINISHED}),
    _S.LOADING: frozenset({_S.RUNNING, _S.WAITING, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.FINISHED}),
    _S.PREEMPTED: frozenset({_S.WAITING, _S.FINISHED}),
    _S.FINISHED: frozenset(),
}


@dataclass(slots=True)
class Request:
    """A prompt and the tokens generated for it so far (one choice). `tail_slot` is held while RUNNING. Of the
    `num_cached_tokens` found at its first start, `num_loaded_tokens` came from the cold tier.

    `blocks` are its blocks in memory; of a sequence that is larger, `num_cold_blocks` before them are on the SSD.
    `has_lane`: it had starved and was let in before urgent ones. `prefill_chunk` bounds its tokens in a step.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    root: BlockHash
    eos_token_ids: frozenset[int] = frozenset()
    choice: int = 0
    priority: PriorityClass = PriorityClass.STANDARD
    tenant: str = ""
    operation: str = ""
    arrival_seconds: float = 0.0
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_loads: int = 0
    blocks: list[Block] = field(default_factory=list)
    num_cold_blocks: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)
    tail_slot: int | None = None
    num_preemptions: int = 0
    num_failed_steps: int = 0
    num_promise_waits: int = 0
    num_tokens_when_preempted: int = 0
    has_lane: bool = False
    prefill_chunk: int | None = None
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that have no KV yet; 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether one token is left to run: a decode, or the last of a prompt, which costs the same."""
        return self.num_uncomputed_tokens == 1

    @property
    def max_new_tokens(self) -> int:
        return self.params.max_tokens - len(self.output_token_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions start..end-1, prompt and output together."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return [*self.prompt_token_ids[start:end], *self.output_token_ids[: max(0, end - num_prompt)]]

    def reason_to_finish(self, token_id: int, max_model_len: int) -> FinishReason | None:
        """Whether the output ends with this token, its last one so far."""
        params = self.params
        if token_id in params.stop_token_ids or (token_id in self.eos_token_ids and not params.ignore_eos):
            return FinishReason.STOP
        if len(self.output_token_ids) >= params.max_tokens or self.num_tokens >= max_model_len:
            return FinishReason.LENGTH
        return None

    def move(self, status: RequestStatus) -> None:
        """Change state; raises AssertionError for an arrow that does not exist."""
        assert status in ARROWS[self.status], f"{self!r} cannot become {status.value}"
        self.status = status

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt={self.num_prompt_tokens}, "
            f"output={len(self.output_token_ids)}, computed={self.num_computed_tokens}, blocks={len(self.blocks)})"
        )
