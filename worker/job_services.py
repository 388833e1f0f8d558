"""What all jobs of a worker share, and what one of them may take."""

from dataclasses import dataclass

from engine.api import GenerationEngine
from worker.broker.api import Producer
from worker.cancel import CancelBook
from worker.clock import Clock
from worker.clock_check import ClockCheck
from worker.dead_letter import DeadLetters
from worker.identities import Identities
from worker.metrics import Metrics
from worker.prefill_chunk import PrefillChunks
from worker.progress import ProgressBook
from worker.quotas import Quotas
from worker.replies.producers import ReplyProducers
from worker.replies.routes import ReplyRoutes
from worker.replies.stream import CoalescePolicy
from worker.settings import Settings
from worker.shared_runs import SharedRuns


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What one request may take."""

    max_body_bytes: int
    max_output_tokens: int
    first_token_seconds: float
    between_tokens_seconds: float
    reply_give_up_seconds: float
    retention_ms: int
    coalesce: CoalescePolicy

    @classmethod
    def of(cls, settings: Settings) -> "JobLimits":
        return cls(
            max_body_bytes=settings.max_body_bytes,
            max_output_tokens=settings.max_output_tokens,
            first_token_seconds=settings.first_token_timeout_ms / 1000,
            between_tokens_seconds=settings.streaming_timeout_ms / 1000,
            reply_give_up_seconds=settings.reply_give_up_seconds,
            retention_ms=int(settings.max_replay_age_seconds * 1000),
            coalesce=CoalescePolicy(settings.stream_coalesce_tokens, settings.stream_coalesce_ms / 1000),
        )


@dataclass(frozen=True, slots=True)
class JobServices:
    """What all jobs of a worker share."""

    engine: GenerationEngine
    producer: Producer
    reply_producers: ReplyProducers
    routes: ReplyRoutes
    dead_letters: DeadLetters
    cancels: CancelBook
    identities: Identities
    runs: SharedRuns
    quotas: Quotas
    progress: ProgressBook
    prefill_chunks: PrefillChunks
    control_topic: str
    clock: Clock
    clock_check: ClockCheck
    metrics: Metrics
    limits: JobLimits
    served_model_names: tuple[str, ...]
    seed: int
    log_requests: bool

    @property
    def model_names(self) -> tuple[str, ...]:
        """What the `model` of a prompt may be, by default the model's own name; replies bear the first one."""
        return self.served_model_names or (self.engine.model.name,)
