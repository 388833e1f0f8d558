"""An engine without a model: the answer is a function of the prompt, so that whoever sent one can say what must come.

For drills, overhead measurements and users' own tests. One token is one byte of UTF-8. Text in the prompt steers it:
`[[error]]` fails, `[[memory]]` finds no memory, `[[stall]]` never answers, `[[die]]` kills the process, `[[slow]]`
answers at 20 tokens a second, `[[tokens=N]]` sets the length.
"""

import asyncio
import heapq
import itertools
import math
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from engine.api import (
    ChatMessage,
    Delta,
    EngineHealth,
    EngineStats,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    PriorityClass,
    TokenLogprob,
    Usage,
)
from engine.errors import (
    CacheCapacityError,
    ContextLengthExceededError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
)
from engine.flight import FlightRecorder
from engine.scripted_answer import (
    TURN_END,
    TURN_START,
    VOCAB_SIZE,
    ByteTokenizer,
    answer_bytes,
    answer_length,
    prompt_text,
    scripted_answer,
)
from engine.text.detokenizer import Detokenizer

__all__ = ["ScriptedEngine", "scripted_answer"]

SLOW_TOKENS_PER_SECOND = 20.0
_RANK = {priority: rank for rank, priority in enumerate(PriorityClass)}


@dataclass(slots=True)
class _Choice:
    index: int
    tokens: bytes
    end: FinishReason
    detokenizer: Detokenizer
    num_sent: int = 0
    done: bool = False


class ScriptedEngine:
    """`GenerationEngine` at a fixed rate per choice. Every answer has its blocks of the pretended KV cache before its
    first token; who finds none waits, urgent ones first. `sleep` is the clock: tests hand in their own."""

    def __init__(
        self,
        name: str = "scripted",
        *,
        tokens_per_second: float = math.inf,
        num_blocks: int = 2048,
        block_size: int = 16,
        max_model_len: int = 8192,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.model = ModelInfo(name, max_model_len, VOCAB_SIZE)
        self.health = EngineHealth()
        self.flight = FlightRecorder()
        self._rate = tokens_per_second
        self._num_blocks, self._block_size = num_blocks, block_size
        self._sleep = sleep
        self._tokenizer = ByteTokenizer()
        self._closed = asyncio.Event()
        self._running: dict[str, int] = {}
        self._waiting: list[tuple[int, int, int, GenerateRequest, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._prompt_tokens = self._generated_tokens = 0

    async def start(self) -> None:
        self.health.ready, self.health.reason = True, ""

    def encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode("utf-8", "replace"))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        ids: list[int] = []
        for message in messages:
            ids += [TURN_START, *self.encode_text(f"{message.role}\n{message.content}"), TURN_END]
        return (*ids, TURN_START, *self.encode_text("assistant\n"))

    def check(self, request: GenerateRequest) -> None:
        num_prompt = len(request.prompt_token_ids)
        if not num_prompt:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if not all(0 <= token < VOCAB_SIZE for token in request.prompt_token_ids):
            raise InvalidRequestError(f"prompt token ids must be between 0 and {VOCAB_SIZE - 1}", param="prompt")
        if num_prompt + request.params.max_tokens > self.model.max_model_len:
            raise ContextLengthExceededError(
                f"{num_prompt} prompt tokens and {request.params.max_tokens} for the answer are more than "
                f"{self.model.max_model_len}",
                param="max_tokens",
            )
        if (needed := self._blocks(request)) > self._num_blocks:
            raise CacheCapacityError(f"the request needs {needed} KV blocks, the cache has {self._num_blocks}")

    def stats(self) -> EngineStats:
        used = sum(self._running.values())
        waiting = [request for *_, request, granted in self._waiting if not granted.done()]
        return EngineStats(
            kv_utilisation=used / self._num_blocks,
            num_running=len(self._running),
            num_waiting=len(waiting),
            num_blocks=self._num_blocks,
            num_free_blocks=self._num_blocks - used,
            waiting_tokens=sum(len(request.prompt_token_ids) for request in waiting),
            prompt_tokens_total=self._prompt_tokens,
            generated_tokens_total=self._generated_tokens,
            steps_total=self._generated_tokens,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """One delta a token, choices in turn; blocks are given back when the iterator is closed."""
        self.check(request)
        if not self.health.ready:
            raise EngineDeadError(f"the engine is not ready: {self.health.reason}")
        if request.request_id in self._running or any(w[3].request_id == request.request_id for w in self._waiting):
            raise InvalidRequestError(f"request id {request.request_id!r} is running already", param="request_id")
        await self._admit(request)
        try:
            self._prompt_tokens += len(request.prompt_token_ids)
            async for delta in self._answer(request):
                yield delta
        finally:
            del self._running[request.request_id]
            self._grant()

    async def close(self) -> None:
        self.health.ready, self.health.reason = False, "closed"
        self._closed.set()
        for *_, granted in self._waiting:
            if not granted.done():
                granted.set_exception(EngineDeadError("the engine was closed"))
        self._waiting.clear()

    async def _answer(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        script = prompt_text(request.prompt_token_ids)
        if "[[error]]" in script:
            raise EngineError("the prompt asked for an error")
        if "[[memory]]" in script:
            raise MemoryError
        if "[[die]]" in script:
            os.kill(os.getpid(), signal.SIGKILL)
        if "[[stall]]" in script:
            await self._closed.wait()
        rate = min(self._rate, SLOW_TOKENS_PER_SECOND) if "[[slow]]" in script else self._rate
        choices = [self._choice(request, index) for index in range(request.params.n)]
        while live := [choice for choice in choices if not choice.done]:
            await self._sleep(1.0 / rate)
            for choice in live:
                if self._closed.is_set():
                    raise EngineDeadError("the engine was closed")
                yield self._advance(request, choice, choices)

    def _choice(self, request: GenerateRequest, index: int) -> _Choice:
        params = request.params
        length = answer_length(request.prompt_token_ids, params.max_tokens, index, params.ignore_eos)
        natural = answer_length(request.prompt_token_ids, self.model.max_model_len, index, False)
        end = FinishReason.STOP if natural == length and not params.ignore_eos else FinishReason.LENGTH
        tokens = answer_bytes(request.prompt_token_ids, length, index)
        return _Choice(index, tokens, end, Detokenizer(self._tokenizer, params.stop))

    def _advance(self, request: GenerateRequest, choice: _Choice, choices: list[_Choice]) -> Delta:
        token = choice.tokens[choice.num_sent]
        choice.num_sent += 1
        self._generated_tokens += 1
        reason: FinishReason | None = None
        text = ""
        if token in request.params.stop_token_ids:
            reason = FinishReason.STOP
        else:
            text = choice.detokenizer.push((token,))
            if choice.detokenizer.stopped:
                reason = FinishReason.STOP
            elif choice.num_sent == len(choice.tokens):
                reason = choice.end
        if reason is not None:
            text += choice.detokenizer.finish()
            choice.done = True
        last = all(other.done for other in choices)
        usage = Usage(len(request.prompt_token_ids), sum(other.num_sent for other in choices)) if last else None
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.params.logprobs is not None:
            logprobs = (
                TokenLogprob(token, chr(token), 0.0, ((token, chr(token), 0.0),) * min(1, request.params.logprobs)),
            )
        return Delta(choice.index, text, (token,), logprobs, reason, usage)

    def _blocks(self, request: GenerateRequest) -> int:
        """Blocks of all choices at their full length."""
        params, prompt = request.params, request.prompt_token_ids
        lengths = (answer_length(prompt, params.max_tokens, index, params.ignore_eos) for index in range(params.n))
        return sum(math.ceil((len(prompt) + length) / self._block_size) for length in lengths)

    async def _admit(self, request: GenerateRequest) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (_RANK[request.priority], next(self._order), self._blocks(request), request, granted)
        heapq.heappush(self._waiting, entry)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if self._running.pop(request.request_id, None) is None and entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            self._grant()
            raise

    def _grant(self) -> None:
        """Blocks to the waiting in order of class, then arrival; nobody overtakes the first."""
        while self._waiting and sum(self._running.values()) + self._waiting[0][2] <= self._num_blocks:
            *_, blocks, request, granted = heapq.heappop(self._waiting)
            if granted.done():  # cancelled, and its task has not run yet
                continue
            self._running[request.request_id] = blocks
            granted.set_result(None)
