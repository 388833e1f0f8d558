"""Mode `final`: one record with the whole answer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api import Delta, TokenLogprob, Usage
from topics.logprobs import TokenEntry, logprobs_object
from topics.replies import Choice, ReplyContext, ReplyRecord, error_record, final_record, usage_object
from worker.replies.api import Failure, ReplySink


def wire_usage(usage: Usage) -> Mapping[str, Any]:
    """OpenAI's usage object of the engine's counts."""
    return usage_object(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.loaded_tokens)


def wire_logprobs(
    operation: str, logprobs: tuple[TokenLogprob, ...] | list[TokenLogprob], *, text_offset: int = 0
) -> Mapping[str, Any] | None:
    """The wire's log probabilities; None where the engine gave none."""
    if not logprobs:
        return None
    entries = [
        TokenEntry(entry.text, entry.logprob, tuple((text, logprob) for _, text, logprob in entry.top))
        for entry in logprobs
    ]
    return logprobs_object(operation, entries, text_offset=text_offset)


class Answer:
    """What has been generated so far, choice by choice."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.finish_reasons: dict[int, str] = {}
        self.logprobs: dict[int, list[TokenLogprob]] = {}
        self.usage = Usage(0, 0)
        self.whole = False

    def add(self, delta: Delta) -> None:
        self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
        self.logprobs.setdefault(delta.index, []).extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reasons[delta.index] = str(delta.finish_reason)
        if delta.usage is not None:
            self.usage = delta.usage
            self.whole = True

    def choices(self, operation: str) -> list[Choice]:
        return [
            Choice(index, text, self.finish_reasons.get(index, "stop"), wire_logprobs(operation, self.logprobs[index]))
            for index, text in sorted(self.texts.items())
        ]


class FinalReplier:
    """Keeps every delta and sends the answer as one record."""

    def __init__(self, context: ReplyContext, sink: ReplySink) -> None:
        self._context = context
        self._sink = sink
        self._answer = Answer()

    async def send(self, delta: Delta) -> None:
        self._answer.add(delta)

    async def finish(self) -> Usage:
        usage = self._answer.usage
        choices = self._answer.choices(self._context.operation)
        await self._sink.send(final_record(self._context, 0, choices=choices, usage=wire_usage(usage)))
        return usage

    async def fail(self, failure: Failure) -> None:
        await self._sink.send(failure_record(self._context, 0, failure, self._answer))

    def restart(self, attempt: str) -> None:
        self._context = replace(self._context, attempt=attempt)

    async def close(self) -> None:
        """It keeps no timer."""


def _spent(failure: Failure, answer: Answer) -> Mapping[str, Any] | None:
    if answer.whole:
        return wire_usage(answer.usage)
    return None if failure.usage is None else wire_usage(failure.usage)


def failure_record(context: ReplyContext, seq: int, failure: Failure, answer: Answer) -> ReplyRecord:
    """The terminal error record of a failure; with the usage of an answer that was whole."""
    return error_record(
        context,
        seq,
        code=failure.code,
        message=failure.message,
        param=failure.param,
        retriable=failure.retriable,
        retry_after_ms=failure.retry_after_ms,
        usage=_spent(failure, answer),
    )
