"""What the caller of `generate` reads: the tokens of a request's choices as they come, made into deltas.

Lives on the event loop; knows neither the engine thread nor the core.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.api import Delta, FinishReason, GenerateRequest, TokenLogprob, Usage
from engine.batch import SampledRow
from engine.errors import EngineError
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class StreamChoice:
    """One choice, an engine request of its own: tokens that arrived and were not read yet."""

    request_id: str
    index: int
    detokenizer: Detokenizer
    tokens: list[SampledRow] = field(default_factory=list)
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did to one engine request, on its way from the engine thread to the loop."""

    request_id: str
    token: SampledRow | None
    finish_reason: FinishReason | None
    error: EngineError | None
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0


class Stream:
    """The choices of one request. Unread tokens merge; a choice that meets a stop string is aborted by `abort`."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, *, abort: Callable[[str], None]) -> None:
        self.choices = [
            StreamChoice(f"{request.request_id}#{index}", index, Detokenizer(tokenizer, request.params.stop))
            for index in range(request.params.n)
        ]
        self._request = request
        self._tokenizer = tokenizer
        self._abort = abort
        self._news = asyncio.Event()

    @property
    def done(self) -> bool:
        """Whether the last delta of every choice has been read."""
        return all(choice.done for choice in self.choices)

    async def news(self) -> None:
        """Wait until something has come since the last time."""
        await self._news.wait()
        self._news.clear()

    def take(self, choice: StreamChoice, progress: Progress) -> None:
        if progress.token is not None:
            choice.tokens.append(progress.token)
            choice.num_cached_tokens = progress.num_cached_tokens
            choice.num_loaded_tokens = progress.num_loaded_tokens
        choice.finish_reason = choice.finish_reason or progress.finish_reason
        choice.error = progress.error
        self._news.set()

    def fail(self, choice: StreamChoice, error: EngineError) -> None:
        """The engine ended; a choice whose last token has come is answered still."""
        if choice.finish_reason is None:
            choice.error = error
        self._news.set()

    def read(self) -> Iterator[Delta]:
        """What has arrived, one delta a choice. Raises the error of a choice that failed."""
        for choice in self.choices:
            if choice.done or not (choice.tokens or choice.finish_reason or choice.error):
                continue
            if choice.error is not None:
                raise choice.error
            yield self._delta(choice)

    def _delta(self, choice: StreamChoice) -> Delta:
        tokens, choice.tokens = choice.tokens, []
        text = ""
        taken: list[SampledRow] = []
        for row in tokens:
            assert row.token_id is not None
            taken.append(row)
            text += choice.detokenizer.push((row.token_id,))
            if choice.detokenizer.stopped:
                if choice.finish_reason is None:
                    self._abort(choice.request_id)
                choice.finish_reason = FinishReason.STOP
                break
        choice.num_tokens += len(taken)
        if choice.finish_reason is not None:
            text += choice.detokenizer.finish()
            choice.done = True
        return Delta(
            index=choice.index,
            text=text,
            token_ids=tuple(row.token_id for row in taken if row.token_id is not None),
            logprobs=self._logprobs(taken) if self._request.params.logprobs is not None else (),
            finish_reason=choice.finish_reason,
            usage=self._usage() if self.done else None,
        )

    def _usage(self) -> Usage:
        return Usage(
            len(self._request.prompt_token_ids),
            sum(choice.num_tokens for choice in self.choices),
            max(choice.num_cached_tokens for choice in self.choices),
            max(choice.num_loaded_tokens for choice in self.choices),
        )

    def _logprobs(self, rows: list[SampledRow]) -> tuple[TokenLogprob, ...]:
        decode = self._tokenizer.decode
        return tuple(
            TokenLogprob(
                row.token_id,
                decode([row.token_id]),
                row.logprob,
                tuple((token, decode([token]), logprob) for token, logprob in row.top),
            )
            for row in rows
            if row.token_id is not None and row.logprob is not None
        )
