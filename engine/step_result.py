"""What became of the requests of a step."""

from dataclasses import dataclass, field

from engine.batch import SampledRow
from engine.request import Request


@dataclass(slots=True)
class StepResult:
    """What an update changed: requests that got a token, requests that ended, and errors by request id."""

    advanced: list[tuple[Request, SampledRow]] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def add(self, other: "StepResult") -> None:
        self.advanced += other.advanced
        self.finished += other.finished
        self.errors |= other.errors

    def fail(self, request: Request, message: str) -> None:
        """It has ended with an error."""
        self.finished.append(request)
        self.errors[request.request_id] = message
