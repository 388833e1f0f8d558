"""One prompt of the demo and what has come of it so far. Knows no broker and no screen."""

from dataclasses import dataclass, field

from topics.attempts import AttemptEvent, AttemptReader, AttemptState, EventKind
from worker.client import Prompt

WAITING, WRITING = "waiting", "writing"


@dataclass(slots=True)
class DemoAnswer:
    """Times are monotonic seconds."""

    prompt: Prompt
    reader: AttemptReader = field(default_factory=AttemptReader)
    sent: float | None = None
    first: float | None = None
    ended: float | None = None
    num_pieces: int = 0

    def seen(self, event: AttemptEvent, now: float) -> None:
        """Take note of when what came; `reader` has been fed already."""
        if event.kind is EventKind.SHOW:
            self.num_pieces = 0
        elif event.kind is EventKind.TEXT:
            self.first = now if self.first is None else self.first
            self.num_pieces += 1
        if self.reader.settled:
            self.ended = now

    @property
    def complete(self) -> bool:
        return self.reader.state is AttemptState.COMPLETE

    @property
    def num_tokens(self) -> int:
        """As the usage says, or, while the answer streams, one for each piece (pieces may carry more)."""
        return int((self.reader.usage or {}).get("completion_tokens", self.num_pieces))

    @property
    def num_cached_tokens(self) -> int | None:
        details = (self.reader.usage or {}).get("prompt_tokens_details") or {}
        return details.get("cached_tokens")

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.first is None or self.sent is None else self.first - self.sent

    def tokens_per_second(self, now: float) -> float | None:
        """From the first token to the end, or to `now`; None while that says nothing."""
        end = now if self.ended is None else self.ended
        if self.first is None or end <= self.first or self.num_tokens < 2:
            return None
        return self.num_tokens / (end - self.first)

    @property
    def outcome(self) -> str:
        """The finish reason, the error's code, or how far it is."""
        if self.reader.settled:
            return str((self.reader.error or {}).get("code") or self.reader.finish_reasons.get(0, "error"))
        return WAITING if self.first is None else WRITING


__all__ = ["WAITING", "WRITING", "DemoAnswer"]
