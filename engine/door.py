"""The way to and from the core's owner while a step runs."""

from typing import Protocol

from engine.step_result import StepResult


class Door(Protocol):
    """Called on the engine's thread, between two segments of a step."""

    def look(self) -> None:
        """Run the commands that have arrived on the core (`add`, `abort`)."""

    def publish(self, result: StepResult) -> None:
        """Take what a step inside the step has given, at once."""
