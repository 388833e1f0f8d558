"""What comes of a prompt: an answer, or an error that says whether to ask again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topics.attempts import AttemptReader, AttemptState
from worker.errors import WorkerError


class NoAnswerError(WorkerError):
    """The answers did not all come within the time limit."""

    code = "no_answer"
    retriable = True


class AnswerChangedError(WorkerError):
    """A second attempt says something else than the text that was already given out."""

    code = "answer_changed"
    retriable = True


class RequestFailedError(WorkerError):
    """The workers refused or could not answer the prompt. `code` is theirs, `param` the field or header it is about,
    `retry_after_ms` when asking again may help."""

    def __init__(self, error: Mapping[str, Any], *, retriable: bool, retry_after_ms: int | None) -> None:
        super().__init__(f"{error.get('code')}: {error.get('message')}")
        self.code = str(error.get("code"))
        self.param = error.get("param")
        self.retriable = retriable
        self.retry_after_ms = retry_after_ms


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; texts and finish reasons by choice, `usage` as OpenAI has it."""

    request_id: str
    texts: Mapping[int, str]
    finish_reasons: Mapping[int, str]
    usage: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.texts.get(0, "")

    @classmethod
    def of(cls, request_id: str, reader: AttemptReader) -> "Answer":
        """From a reader that has settled. Raises RequestFailedError for one that settled with an error."""
        if reader.state is AttemptState.ERROR:
            raise RequestFailedError(
                reader.error or {}, retriable=reader.retriable, retry_after_ms=reader.retry_after_ms
            )
        return cls(request_id, dict(reader.texts), dict(reader.finish_reasons), reader.usage or {})
