"""Sequences that are larger than the KV memory: one at a time, in steps of its own, in a window of the memory."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from engine.api import PriorityClass
from engine.batch import ScheduledRow
from engine.cache.manager import KVCacheManager
from engine.config import EngineConfig
from engine.errors import CacheStoreFullError, ColdReadError
from engine.future_peak import future_peak_blocks
from engine.loads import Loads
from engine.policy import PriorityPolicy
from engine.predictors import OutputLengthPredictor
from engine.request import Request, RequestStatus

WINDOW_SHARE = 0.5
"""Of the blocks, what the sequence in the lane has; whoever fits into the rest runs between its steps."""
MAX_LOSSES = 2
"""How often a sequence is computed again from the first block that the SSD has lost."""


class LongLane:
    """Decides who is in the lane, what its next step is, and when that is due.

    A sequence in the lane leaves its oldest full blocks to the SSD. Whoever is in it has the same time as all others
    together. It gives way to a request that the rest of the memory does not hold, if that is urgent, has to run alone,
    or has aged and is older; an aged one that is younger waits until the lane has had a turn of `ageing_seconds`. It
    goes on behind that one: what it had written is not computed again. Once one before the lane has aged, nobody that
    large starts before it who would not make it give way.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCacheManager,
        policy: PriorityPolicy,
        lengths: OutputLengthPredictor,
        loads: Loads,
    ) -> None:
        self.window = max(2, int(WINDOW_SHARE * config.num_blocks))
        self.waiting: list[Request] = []
        self.request: Request | None = None
        self.num_reserved_blocks = 0
        self.keeps_large_out = False
        self._config = config
        self._cache = cache
        self._policy = policy
        self._lengths = lengths
        self._loads = loads
        self._losses: Counter[str] = Counter()
        self._began: float | None = None
        self._due_at = 0.0
        self._younger_press_at = math.inf

    def __repr__(self) -> str:
        return f"LongLane({self.request!r}, waiting={len(self.waiting)})"

    @property
    def max_blocks(self) -> int:
        """Of a sequence that can be served, the lane included."""
        cold = self._cache.cold_prefix
        return max(self._config.num_blocks, self.window + cold.max_blocks if cold is not None else 0)

    @property
    def num_unfilled_blocks(self) -> int:
        """What the sequence in the lane may still take of its window."""
        return 0 if self.request is None else max(0, self.window - len(self.request.blocks))

    def is_long(self, request: Request) -> bool:
        return self._blocks_at_end(request) > self._config.num_blocks

    def is_large(self, request: Request) -> bool:
        """Whether there may be no room for it beside the lane."""
        return self._blocks_at_end(request) > self._config.num_blocks - self.window

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """One that ends, in the lane or before it."""
        self._losses.pop(request.request_id, None)
        if request is self.request:
            self.leave()
        else:
            self.waiting.remove(request)

    def leave(self) -> None:
        """The lane is free; the caller has the blocks of who was in it released."""
        assert self.request is not None, "nobody is in the lane"
        self.request.tail_slot = self.request = self._began = None
        self._tell_writes(False)

    def gives_way(self, waiting: Iterable[Request], now: float) -> bool:
        return self.request is not None and self._is_pressed(self.request, waiting, now)

    def admit(self, running: Sequence[Request], waiting: Iterable[Request], now: float) -> None:
        """Reserve the window for who is in the lane or comes next, and let that one in once the window is free. While
        large requests run, others as large stay out once it has aged."""
        self.num_reserved_blocks, self.keeps_large_out = 0, False
        if self.request is None:
            if not self.waiting:
                return
            first = min(self.waiting, key=lambda request: self._policy.key(request, now))
            is_taken = any(map(self.is_large, running))
            if is_taken:
                self._younger_press_at = math.inf  # one of them has its turn: the next one is the lane's
            if self._is_pressed(first, waiting, now):
                return
            if is_taken:
                self.keeps_large_out = self._has_aged(first, now)
                return
            peak = future_peak_blocks(running, self._cache, self._lengths) if running else 0
            if max(peak, self._cache.pool.num_used) + self.window <= self._config.num_blocks:
                self._start(first, now)
        self.num_reserved_blocks, self.keeps_large_out = self.window, True

    def is_due(self, now: float) -> bool:
        """Whether the others have had as long as the latest step of the lane; to be asked once for each step."""
        if self._began is None:
            return now >= self._due_at
        self._due_at, self._began = now + (now - self._began), None
        return False

    def step(self, max_chunk: int, now: float) -> ScheduledRow | None:
        """The next row, which has to be alone in its step; None while blocks that have to go are not on the SSD yet.

        Raises CacheStoreFullError where the SSD does not take them, or hangs."""
        request, cold = self.request, self._cache.cold_prefix
        if request is None or cold is None:
            return None
        if not cold.write_ahead(request):
            raise CacheStoreFullError("the sequence is larger than the KV memory, and the SSD does not take its blocks")
        num_new = min(request.num_uncomputed_tokens, max_chunk, max(1, self.window // 2) * self._config.block_size)
        num_held = len(request.blocks) + self._cache.num_missing_blocks(request, num_new)
        if num_held > self.window and not cold.spill(request, num_held - self.window):
            if cold.transfers.is_write_hung:
                raise CacheStoreFullError("the sequence is larger than the KV memory, and the SSD does not answer")
            return None
        while not self._cache.allocate(request, num_new):
            if not self._loads.cancel_latest():
                return None
        self._began = now
        return ScheduledRow.of(request, num_new)

    def is_hopeless(self, request_id: str, error: Exception) -> bool:
        """Whether a step that failed so is the end of its sequence: the disk hangs, or has lost blocks too often."""
        if not isinstance(error, ColdReadError):
            return False
        self._losses[request_id] += 1
        return error.is_hung or self._losses[request_id] > MAX_LOSSES

    def _start(self, request: Request, now: float) -> None:
        self.waiting.remove(request)
        self._younger_press_at = now + self._policy.ageing_seconds
        num_found = self._cache.attach_cold_prefix(request, self.window // 2)
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(num_found, request.num_prompt_tokens)
            request.num_loaded_tokens = min(
                request.num_cold_blocks * self._config.block_size, request.num_cached_tokens
            )
        request.tail_slot = self._config.max_num_seqs  # a slot of its own, behind those of all others
        request.move(RequestStatus.RUNNING)
        self.request = request
        self._tell_writes(True)

    def _is_pressed(self, long: Request, waiting: Iterable[Request], now: float) -> bool:
        """Whether a large request comes before this one. An aged one does if it is older, or the lane had a turn."""
        return any(
            request.priority is PriorityClass.URGENT
            or request.num_failed_steps > 0  # it has to run alone, and until then nobody else does
            or (
                self._has_aged(request, now)
                and (request.arrival_seconds < long.arrival_seconds or now >= self._younger_press_at)
            )
            for request in waiting
            if self.is_large(request)
        )

    def _has_aged(self, request: Request, now: float) -> bool:
        return now - request.arrival_seconds >= self._policy.ageing_seconds

    def _blocks_at_end(self, request: Request) -> int:
        total = request.num_prompt_tokens + request.params.max_tokens
        return self._cache.blocks_for(min(total, self._config.max_model_len))

    def _tell_writes(self, tells: bool) -> None:
        if self._cache.cold_prefix is not None:
            self._cache.cold_prefix.transfers.tells_writes = tells

    def check(self) -> None:
        """One at most is in the lane, within its window; the others have nothing, on the SSD either."""
        assert all(r.status is RequestStatus.WAITING and not r.blocks for r in self.waiting), self.waiting
        assert not any(r.num_cold_blocks for r in self.waiting), self.waiting
        request = self.request
        if request is not None:
            assert request.status is RequestStatus.RUNNING and len(request.blocks) <= self.window, self
            held = (request.num_cold_blocks + len(request.blocks)) * self._config.block_size
            assert request.num_computed_tokens <= held, self
        if self._cache.cold_prefix is not None:
            self._cache.cold_prefix.check(request)
