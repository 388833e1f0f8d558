"""What the worker tells of itself while it works. `worker.metrics` implements it; nothing here knows Prometheus."""

from typing import Protocol

from engine.api import PriorityClass


class Observer(Protocol):
    def record_polled(self, cls: PriorityClass) -> None: ...

    def request_finished(
        self,
        cls: PriorityClass,
        reason: str,
        seconds: float,
        first_token_seconds: float | None,
        prompt_tokens: int,
        completion_tokens: int,
    ) -> None: ...

    def error(self, code: str) -> None: ...

    def stream_timeout(self, cause: str) -> None: ...

    def dead_letter(self) -> None: ...


class NullObserver:
    """Listens to nothing."""

    def record_polled(self, cls: PriorityClass) -> None: ...

    def request_finished(
        self,
        cls: PriorityClass,
        reason: str,
        seconds: float,
        first_token_seconds: float | None,
        prompt_tokens: int,
        completion_tokens: int,
    ) -> None: ...

    def error(self, code: str) -> None: ...

    def stream_timeout(self, cause: str) -> None: ...

    def dead_letter(self) -> None: ...
