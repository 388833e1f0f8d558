"""What the worker sees of any engine: prompts in, text deltas out. No tensors, no Kafka."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from engine.flight import FlightRecorder
from engine.sampling_params import SamplingParams


class PriorityClass(StrEnum):
    """Service class, most urgent first (the order of definition is the order of service)."""

    URGENT = "urgent"
    STANDARD = "standard"
    BULK = "bulk"


class Decision(StrEnum):
    """What a scheduler decided about a request, as it is counted."""

    STARTED = "started"
    SQUEEZED_IN = "squeezed_in"
    STARVING = "starving"
    INTERRUPTED = "interrupted"
    PREEMPTED_FOR_URGENT = "preempted_for_urgent"
    PREEMPTED_FOR_BLOCKS = "preempted_for_blocks"
    PREEMPTED_AFTER_FAILURE = "preempted_after_failure"
    PREEMPTED_FROM_LANE = "preempted_from_lane"
    PREFILL_BOUNDED = "prefill_bounded"
    CHUNK_HALVED = "chunk_halved"
    HEAT_BOUNDED = "heat_bounded"


class FinishReason(StrEnum):
    """Why a choice ended. STOP and LENGTH are OpenAI's; ABORT never reaches a client as an answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is public of the model: `max_model_len` in tokens, prompt with answer; `kernels` is what computes."""

    name: str
    max_model_len: int
    vocab_size: int
    kernels: str = "none"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; `content` is text of a user and never becomes a control token."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt for `generate`. `tenant` salts the prefix cache; `arrival_seconds` is monotonic time,
    None is now; `prefill_chunk` bounds the prompt tokens of a step."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: PriorityClass = PriorityClass.STANDARD
    tenant: str = ""
    operation: str = "/v1/chat/completions"
    arrival_seconds: float | None = None
    prefill_chunk: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability (natural) of a chosen token, and the best alternatives as (token id, text, log probability)."""

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole request, all choices together. Of the `cached_tokens`, `loaded_tokens` were on the SSD."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    loaded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice; several steps may be merged in one. `finish_reason` is set on a choice's last delta,
    `usage` on the last delta of the request."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


READ_LATENCY_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Upper ends, in seconds, of the classes in which reads of the cold tier are counted; one more holds the rest."""


@dataclass(frozen=True, slots=True)
class ColdStats:
    """The SSD tier of the KV cache. A block counts by its records: header and padding included in bytes."""

    num_blocks: int = 0
    file_bytes: int = 0
    capacity_bytes: int = 0
    is_hung: bool = False
    loaded_blocks_total: int = 0
    loads_total: int = 0
    late_loads_total: int = 0
    corrupt_blocks_total: int = 0
    missing_blocks_total: int = 0
    evictions_total: int = 0
    dropped_writes_total: int = 0
    failed_writes_total: int = 0
    read_bytes_total: int = 0
    written_bytes_total: int = 0
    rewritten_bytes_total: int = 0
    streamed_bytes_total: int = 0
    read_seconds_total: float = 0.0
    read_latency_counts: tuple[int, ...] = (0,) * (len(READ_LATENCY_BOUNDS) + 1)
    gate_decisions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for intake and metrics. Ratios are 0..1; counters only grow; seconds are sums.
    Errors are absolute differences between what was predicted and what came, summed. Of the cached prompt tokens, the
    loaded ones came from the SSD; `cold` is None without one. Of the running and waiting requests, those in and before
    the lane are larger than the KV memory."""

    kv_utilisation: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_in_lane: int = 0
    num_waiting_for_lane: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    waiting_tokens: int = 0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    cached_prompt_tokens_total: int = 0
    loaded_prompt_tokens_total: int = 0
    preemptions_total: int = 0
    evictions_total: int = 0
    steps_total: int = 0
    celsius: float | None = None
    interrupts_total: int = 0
    decisions: Mapping[Decision, int] = field(default_factory=dict)
    step_error_seconds_total: float = 0.0
    length_predictions_total: int = 0
    length_error_tokens_total: int = 0
    busy_seconds_total: float = 0.0
    prefill_seconds_total: float = 0.0
    decode_seconds_total: float = 0.0
    cold: ColdStats | None = None


@dataclass(slots=True)
class EngineHealth:
    """Whether the engine can serve; `reason` says why not."""

    ready: bool = False
    reason: str = "loading"
    notes: list[str] = field(default_factory=list)


class GenerationEngine(Protocol):
    """Contract of every engine behind the worker (`engine.engine.Engine`, `engine.scripted.ScriptedEngine`).

    All methods are called on one event loop and never block it; `encode_*` are synchronous and may be run in a thread.
    """

    health: EngineHealth
    flight: FlightRecorder

    @property
    def model(self) -> ModelInfo:
        """Known once `start` has returned."""

    async def start(self) -> None:
        """Load and start; returns when `health.ready`. Raises ModelLoadError."""

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Token ids of a conversation rendered by the model's template, with the assistant's turn opened."""

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text; never contains a control token made from the text itself."""

    def check(self, request: GenerateRequest) -> None:
        """Raise ContextLengthExceededError, CacheCapacityError or InvalidRequestError for what can never run."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Stream deltas until every choice has a finish reason. Closing the iterator aborts the request.

        Raises InvalidRequestError at once, EngineError when this request or the engine fails.
        """

    def stats(self) -> EngineStats:
        """The latest snapshot."""

    async def close(self) -> None:
        """Abort everything and end the engine thread; idempotent."""
