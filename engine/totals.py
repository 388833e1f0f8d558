"""What an engine has done since it started."""

from dataclasses import dataclass

from engine.batch import ScheduledBatch
from engine.step_result import StepResult


@dataclass(slots=True)
class Totals:
    """Steps that failed count nothing. Cached and loaded tokens are of prompts, counted with their first token."""

    steps: int = 0
    interrupts: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    busy_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def count(self, batch: ScheduledBatch, result: StepResult, seconds: float) -> None:
        """A step that took so long by itself; its prefill and decode share the time by their tokens."""
        prefill = batch.num_prefill_tokens / batch.num_tokens
        self.steps += 1
        self.busy_seconds += seconds
        self.prefill_seconds += prefill * seconds
        self.decode_seconds += (1 - prefill) * seconds
        self.generated_tokens += len(result.advanced)
        for request, _ in result.advanced:
            if len(request.output_token_ids) == 1:
                self.prompt_tokens += request.num_prompt_tokens
                self.cached_tokens += request.num_cached_tokens
                self.loaded_tokens += request.num_loaded_tokens
