"""Modes `chunks` and `both`: text while it is generated, small deltas sent together."""

import asyncio
import contextlib
from dataclasses import dataclass, field, replace

from engine.api import Delta, TokenLogprob, Usage
from topics.replies import ReplyContext, ReplyRecord, chunk_record, final_record
from worker.clock import Clock
from worker.replies.api import Failure, ReplySink
from worker.replies.final import Answer, failure_record, wire_logprobs, wire_usage


@dataclass(frozen=True, slots=True)
class CoalescePolicy:
    """A chunk is sent when it has `max_tokens`, or `max_seconds` after the one before."""

    max_tokens: int = 8
    max_seconds: float = 0.05


@dataclass(slots=True)
class _Pending:
    text: str = ""
    num_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    started: bool = False
    ended: bool = False
    sent_at: float = 0.0
    sent_chars: int = 0


class StreamReplier:
    """The first text of a choice is sent at once; a choice's end is never kept back.

    With `whole` the last record is the whole answer and every chunk before it is a plain chunk (mode `both`); without
    it the last chunk is the terminal record. Held text is sent within `max_seconds` also when nothing follows it: a
    timer, set only while text is held, sends it in a task that the next call here or `close` awaits.
    """

    def __init__(
        self, context: ReplyContext, sink: ReplySink, *, clock: Clock, policy: CoalescePolicy, whole: bool
    ) -> None:
        self._context = context
        self._sink = sink
        self._clock = clock
        self._policy = policy
        self._whole = whole
        self._answer = Answer()
        self._pending: dict[int, _Pending] = {}
        self._seq = 0
        self._timer: asyncio.TimerHandle | None = None
        self._late: asyncio.Task[None] | None = None

    async def send(self, delta: Delta) -> None:
        self._answer.add(delta)  # first: a restart has to find it
        await self._settle()
        pending = self._pending.setdefault(delta.index, _Pending())
        pending.text += delta.text
        pending.num_tokens += len(delta.token_ids)
        pending.logprobs.extend(delta.logprobs)
        pending.ended = delta.finish_reason is not None
        last = delta.usage is not None
        if not (last and not self._whole) and self._is_due(pending):
            await self._flush(delta.index, pending, final=False)
        if not last:
            self._set_timer()

    async def finish(self) -> Usage:
        await self._settle()
        usage = self._answer.usage
        if self._whole:
            for index, pending in sorted(self._pending.items()):
                if pending.text:
                    await self._flush(index, pending, final=False)
            choices = self._answer.choices(self._context.operation)
            await self._emit(final_record(self._context, self._seq, choices=choices, usage=wire_usage(usage)))
            return usage
        unsent = [index for index, pending in self._pending.items() if pending.ended or pending.text]
        last = unsent[-1] if unsent else 0
        for index in unsent[:-1]:
            await self._flush(index, self._pending[index], final=False)
        await self._flush(last, self._pending.setdefault(last, _Pending(ended=True)), final=True)
        return usage

    async def fail(self, failure: Failure) -> None:
        await self._settle()
        await self._emit(failure_record(self._context, self._seq, failure, self._answer))

    def restart(self, attempt: str) -> None:
        self._stop_timer()
        self._context = replace(self._context, attempt=attempt)
        self._seq = 0
        self._pending = {
            index: _Pending(
                text=text,
                num_tokens=self._policy.max_tokens,
                logprobs=list(self._answer.logprobs[index]),
                ended=index in self._answer.finish_reasons,
            )
            for index, text in self._answer.texts.items()
        }
        if not self._answer.whole:
            self._set_timer()

    async def close(self) -> None:
        self._stop_timer()
        late, self._late = self._late, None
        if late is not None:
            late.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await late

    async def _settle(self) -> None:
        """Nothing is sent by the timer from here on; raises what it met."""
        self._stop_timer()
        if self._late is not None:
            late, self._late = self._late, None
            await late

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        due = [held.sent_at for held in self._pending.values() if held.text]
        if due:
            seconds = min(due) + self._policy.max_seconds - self._clock.now()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._send_late)

    def _send_late(self) -> None:
        self._timer = None
        self._late = asyncio.get_running_loop().create_task(self._flush_held())

    async def _flush_held(self) -> None:
        for index, pending in sorted(self._pending.items()):
            if pending.text:
                await self._flush(index, pending, final=False)

    def _is_due(self, pending: _Pending) -> bool:
        if pending.ended:
            return True
        if not pending.text:
            return False
        waited = self._clock.now() - pending.sent_at
        return (
            not pending.started or pending.num_tokens >= self._policy.max_tokens or waited >= self._policy.max_seconds
        )

    async def _flush(self, index: int, pending: _Pending, *, final: bool) -> None:
        operation = self._context.operation
        record = chunk_record(
            self._context,
            self._seq,
            index=index,
            text=pending.text,
            role_first=not pending.started,
            finish_reason=self._answer.finish_reasons.get(index, "stop") if pending.ended else None,
            usage=wire_usage(self._answer.usage) if final else None,
            logprobs=wire_logprobs(operation, pending.logprobs, text_offset=pending.sent_chars),
            final=final,
        )
        self._pending[index] = _Pending(
            started=True, sent_at=self._clock.now(), sent_chars=pending.sent_chars + len(pending.text)
        )
        await self._emit(record)

    async def _emit(self, record: ReplyRecord) -> None:
        await self._sink.send(record)
        self._seq += 1
