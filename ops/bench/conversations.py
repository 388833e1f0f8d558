"""Conversations of several turns in a closed loop on an engine core: a turn repeats all before it, answers included."""

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from engine.cache.block import root_hash
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.models.layers import Model
from engine.request import Request
from engine.runner import TorchRunner
from engine.sampling_params import SamplingParams

ROOT = root_hash(tenant="", model_digest="bench", layout_id="bench")


@dataclass
class Shape:
    """`num_conversations` talk in turn, `num_clients` at a time."""

    num_conversations: int
    num_turns: int = 8
    num_new_tokens: int = 60
    num_answer_tokens: int = 4
    num_clients: int = 2

    @property
    def num_tokens(self) -> int:
        """Of a whole conversation."""
        return self.num_turns * (self.num_new_tokens + self.num_answer_tokens)


@dataclass
class Measured:
    """Seconds to the first token of each turn, and where the KV of its prompt came from."""

    first_token_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_output_tokens: int = 0
    prompt_tokens: int = 0
    l2_tokens: int = 0
    l3_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds

    def add(self, other: "Measured") -> None:
        self.first_token_seconds += other.first_token_seconds
        self.seconds += other.seconds
        self.num_output_tokens += other.num_output_tokens
        self.prompt_tokens += other.prompt_tokens
        self.l2_tokens += other.l2_tokens
        self.l3_tokens += other.l3_tokens


class Talk:
    """Conversations on one core. Turns go round: all conversations have their first one, then all their second."""

    def __init__(self, core: EngineCore, corpus: list[int], shape: Shape, name: str) -> None:
        self.core, self.shape, self.name = core, shape, name
        self.histories: list[list[int]] = [[] for _ in range(shape.num_conversations)]
        self._corpus = corpus
        self._num_turns_done = 0
        self._landed = threading.Event()
        if core.cache.cold is not None:
            core.cache.cold.transfers.on_landed = self._landed.set

    def run(self, num_turns: int) -> Measured:
        """The next turns of every conversation."""
        measured = Measured()
        todo = deque(
            (turn, index)
            for turn in range(self._num_turns_done, self._num_turns_done + num_turns)
            for index in range(self.shape.num_conversations)
        )
        self._num_turns_done += num_turns
        running: dict[str, tuple[int, Request, float]] = {}
        waiting_for: set[int] = set()
        began = time.perf_counter()
        while todo or running:
            while todo and len(running) < self.shape.num_clients and todo[0][1] not in waiting_for:
                turn, index = todo.popleft()
                request = self._ask(turn, index)
                running[request.request_id] = (index, request, time.perf_counter())
                waiting_for.add(index)
                self.core.add(request)
            result = self.core.step()
            now = time.perf_counter()
            for request, _ in result.advanced:
                if len(request.output_token_ids) == 1:
                    measured.first_token_seconds.append(now - running[request.request_id][2])
            for request in result.finished:
                index, _, _ = running.pop(request.request_id)
                waiting_for.discard(index)
                self.histories[index] += request.output_token_ids
                self._count(measured, request)
            if not result.advanced and not result.finished:
                self._rest()
        measured.seconds = time.perf_counter() - began
        return measured

    def _ask(self, turn: int, index: int) -> Request:
        shape, history = self.shape, self.histories[index]
        start = (index * shape.num_turns + turn) * shape.num_new_tokens % (len(self._corpus) - shape.num_new_tokens)
        history += self._corpus[start : start + shape.num_new_tokens]
        params = SamplingParams(max_tokens=shape.num_answer_tokens, temperature=0, ignore_eos=True)
        return Request(f"{self.name}-{index}-{turn}", tuple(history), params, ROOT, arrival_seconds=time.monotonic())

    def _rest(self) -> None:
        rest = self.core.rest_seconds
        if rest:
            self._landed.wait(rest)
        self._landed.clear()

    @staticmethod
    def _count(measured: Measured, request: Request) -> None:
        measured.num_output_tokens += len(request.output_token_ids)
        measured.prompt_tokens += request.num_prompt_tokens
        measured.l3_tokens += request.num_loaded_tokens
        measured.l2_tokens += request.num_cached_tokens - request.num_loaded_tokens


def new_core(model: Model, config: EngineConfig, disk: object = None) -> EngineCore:
    """A core with a KV memory of its own; the model is shared."""
    from engine.cache.opening import open_transfers

    runner = TorchRunner(model, config)
    transfers = None
    if config.cold is not None:
        transfers = open_transfers(config.cold, runner.cache, disk=disk)  # type: ignore[arg-type]
    core = EngineCore(config, runner, transfers=transfers)
    core.warm_up()
    return core
