"""The async facade over the engine thread: prompts in on the event loop, text deltas out. Never blocks the loop."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.api import (
    ChatMessage,
    Delta,
    EngineHealth,
    EngineStats,
    FinishReason,
    GenerateRequest,
    ModelInfo,
)
from engine.cache.block import root_hash
from engine.core import EngineCore
from engine.errors import EngineDeadError, EngineError, InvalidRequestError
from engine.flight import FlightRecorder
from engine.loaded_model import LoadedModel
from engine.request import Request
from engine.step_result import StepResult
from engine.streams import Progress, Stream, StreamChoice

_log = logging.getLogger(__name__)


class Engine:
    """`GenerationEngine` on a model. One thread owns the core; an inbox takes commands to it, and all outputs of a step
    come back in one call. Unread tokens merge, so a slow reader holds nobody up."""

    def __init__(self, load: Callable[[], LoadedModel]) -> None:
        self.health = EngineHealth()
        self.flight = FlightRecorder()
        self._load = load
        self._loaded: LoadedModel | None = None
        self._inbox: queue.SimpleQueue[Callable[[EngineCore], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, tuple[Stream, StreamChoice]] = {}
        self._stats = EngineStats()
        self._thread: threading.Thread | None = None
        self._closed = self._ending = False

    @property
    def model(self) -> ModelInfo:
        return self._model().info

    def _model(self) -> LoadedModel:
        if self._loaded is None:
            raise EngineDeadError("the engine has not been started")
        return self._loaded

    async def start(self) -> None:
        """Load the model in a thread and start the engine thread.

        Raises ModelLoadError, and EngineDeadError when it was closed meanwhile."""
        try:
            loaded = await asyncio.to_thread(self._load)
        except EngineError as error:
            self.health.reason = str(error)
            raise
        if self._closed:
            await asyncio.to_thread(loaded.core.close)
            raise EngineDeadError("the engine was closed while it loaded")
        self._loaded = loaded
        loaded.core.flight = self.flight
        if loaded.core.cache.cold is not None:
            loaded.core.cache.cold.transfers.on_landed = partial(self._inbox.put, EngineCore.look_again)
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop, self._loaded.core), name="engine", daemon=True)
        self._thread.start()
        self.health.ready, self.health.reason = True, ""

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        return self._model().tokenizer.encode_chat(messages)

    def encode_text(self, text: str) -> tuple[int, ...]:
        return self._model().tokenizer.encode_text(text)

    def check(self, request: GenerateRequest) -> None:
        loaded = self._model()
        size = loaded.info.vocab_size
        if not all(0 <= token < size for token in request.prompt_token_ids):
            raise InvalidRequestError(f"prompt token ids must be between 0 and {size - 1}", param="prompt")
        named = [*request.params.logit_bias, *request.params.stop_token_ids]
        if not all(0 <= token < size for token in named):
            raise InvalidRequestError(f"token ids must be between 0 and {size - 1}", param="logit_bias")
        loaded.core.check_request(len(request.prompt_token_ids), request.params.max_tokens)

    def stats(self) -> EngineStats:
        return self._stats

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Deltas of all choices until each has a finish reason; closing the iterator aborts what still runs."""
        self.check(request)
        if not self.health.ready:
            raise EngineDeadError(self.health.reason or None)
        loaded = self._model()
        tokenizer, params = loaded.tokenizer, request.params
        stream = Stream(request, tokenizer, abort=self._abort)
        if any(choice.request_id in self._streams for choice in stream.choices):
            raise InvalidRequestError(f"request id {request.request_id!r} is running already", param="request_id")
        arrived = time.monotonic() if request.arrival_seconds is None else request.arrival_seconds
        root = root_hash(tenant=request.tenant, model_digest=loaded.digest, layout_id=loaded.layout_id)
        for choice in stream.choices:
            self._streams[choice.request_id] = (stream, choice)
            sequence = Request(
                request_id=choice.request_id,
                prompt_token_ids=request.prompt_token_ids,
                params=params,
                root=root,
                eos_token_ids=tokenizer.eos_token_ids,
                choice=choice.index,
                priority=request.priority,
                tenant=request.tenant,
                operation=request.operation,
                arrival_seconds=arrived,
                prefill_chunk=request.prefill_chunk,
            )
            self._inbox.put(partial(self._add, asyncio.get_running_loop(), sequence))
        try:
            while not stream.done:
                await stream.news()
                for delta in stream.read():
                    yield delta
        finally:
            for choice in stream.choices:
                self._streams.pop(choice.request_id, None)
                if choice.finish_reason is None:
                    self._abort(choice.request_id)

    def _add(self, loop: asyncio.AbstractEventLoop, sequence: Request, core: EngineCore) -> None:
        """On the engine thread: queue a request, or tell its reader why not."""
        try:
            core.add(sequence)
        except EngineError as error:
            failed = Progress(sequence.request_id, None, FinishReason.ERROR, error, 0)
            self._hand_over(loop, [failed], core.stats())

    def _abort(self, request_id: str) -> None:
        self._inbox.put(lambda core: core.abort(request_id))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.health.ready, self.health.reason = False, "closed"
        self._inbox.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.core.close)
        self._fail_all("the engine was closed")

    def _run(self, loop: asyncio.AbstractEventLoop, core: EngineCore) -> None:
        """The engine thread: take commands, step, hand the outputs over."""
        door = _Door(self, loop, core)
        try:
            while self._take_commands(loop, core):
                door.publish(core.step(door))
        except Exception as error:  # the thread's last words, it ends here: every stream must hear that it is gone
            _log.exception("the engine thread ended")
            reason = f"the engine thread ended: {type(error).__name__}: {error}"
            self._call(loop, lambda: self._die(reason))

    def _take_commands(self, loop: asyncio.AbstractEventLoop, core: EngineCore) -> bool:
        """Run all commands in the inbox, waiting for one if there is nothing to step; False to end the thread."""
        while not self._ending:
            try:
                rest = core.rest_seconds
                command = self._inbox.get(block=rest != 0.0, timeout=rest)
            except queue.Empty:
                return True
            self._ending = command is None
            if command is not None:
                command(core)
            if not core.has_work:
                self._hand_over(loop, [], core.stats())
        return False

    def take_arrived(self, core: EngineCore) -> None:
        """Run the commands that are in the inbox now, in the middle of a step: the thread ends after it."""
        while not self._inbox.empty() and not self._ending:
            command = self._inbox.get()
            self._ending = command is None
            if command is not None:
                command(core)

    def publish(self, loop: asyncio.AbstractEventLoop, result: StepResult, stats: EngineStats) -> None:
        """On the engine thread: tell the readers what a step has done to their requests."""
        ended = {request.request_id: request for request in result.finished}
        progress = [
            Progress(r.request_id, token, r.finish_reason, None, r.num_cached_tokens, r.num_loaded_tokens)
            for r, token in result.advanced
        ]
        progress += [
            Progress(request_id, None, ended[request_id].finish_reason, EngineError(error), 0)
            for request_id, error in result.errors.items()
        ]
        self._hand_over(loop, progress, stats)

    def _hand_over(self, loop: asyncio.AbstractEventLoop, progress: list[Progress], stats: EngineStats) -> None:
        self._call(loop, lambda: self._receive(progress, stats))

    def _call(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            loop.call_soon_threadsafe(callback)

    def _receive(self, progress: list[Progress], stats: EngineStats) -> None:
        self._stats = stats
        for item in progress:
            if item.request_id not in self._streams:
                continue
            stream, choice = self._streams[item.request_id]
            stream.take(choice, item)

    def _die(self, reason: str) -> None:
        self.health.ready, self.health.reason = False, reason
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        """Tell every reader that it is the engine that ended: its request may run elsewhere."""
        for stream, choice in self._streams.values():
            stream.fail(choice, EngineDeadError(reason))


@dataclass(frozen=True, slots=True)
class _Door:
    """The core's `Door` to the inbox and the readers of an engine."""

    engine: Engine
    loop: asyncio.AbstractEventLoop
    core: EngineCore

    def look(self) -> None:
        self.engine.take_arrived(self.core)

    def publish(self, result: StepResult) -> None:
        self.engine.publish(self.loop, result, self.core.stats())
