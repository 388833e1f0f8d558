"""What all jobs of a worker share, and what one of them may take."""

from dataclasses import dataclass

from engine.api import GenerationEngine
from worker.broker.api import Producer
from worker.cancel import CancelBook
from worker.clock import Clock
from worker.dead_letter import DeadLetters
from worker.identities import Identities
from worker.metrics import Metrics
from worker.replies.producers import ReplyProducers
from worker.replies.routes import ReplyRoutes
from worker.replies.stream import CoalescePolicy
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
    control_topic: str
    clock: Clock
    metrics: Metrics
    limits: JobLimits
