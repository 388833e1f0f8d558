"""The engine's bookkeeping over all tiers, under random work on a disk that fails at random."""

import errno
import random
import time
from pathlib import Path
from typing import Any

import pytest

from engine.api import FinishReason, PriorityClass
from engine.batch import Layers, SampledRow, ScheduledBatch
from engine.cache.block import root_hash
from engine.cache.cost import GateDecision, TransferCost
from engine.cache.disk_tier import DiskTier
from engine.cache.record import record_bytes
from engine.cache.segments import SegmentStore
from engine.cache.transfers import Transfers
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import Request
from engine.sampling_params import SamplingParams

VOCABULARY = 97
ROOT = root_hash(tenant="", model_digest="test", layout_id="test")
SIZE, NUM_BLOCKS = 4, 24


def next_token(tokens: list[int]) -> int:
    """A model whose every token depends on all tokens before it."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCABULARY


def expected(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class TokenMemory:
    """Keeps a byte for each token where a model keeps KV, and answers from what it reads there."""

    bytes_per_block = SIZE

    def __init__(self) -> None:
        self.cells = bytearray(NUM_BLOCKS * SIZE)
        self.fail_next = False
        self.batch = ScheduledBatch()

    def block_bytes(self, block_id: int) -> memoryview:
        return memoryview(self.cells)[block_id * SIZE : (block_id + 1) * SIZE]

    def segments(self, batch: ScheduledBatch) -> list[Layers]:
        return [(0, 1)]

    def launch(self, batch: ScheduledBatch, layers: Layers) -> None:
        self.batch = batch
        for row in batch.rows:
            for position, token in enumerate(row.token_ids, start=row.start):
                self.cells[row.block_table[position // SIZE] * SIZE + position % SIZE] = token
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("made to fail")

    def sample(self) -> None:
        pass

    def collect(self) -> list[SampledRow]:
        sampled = []
        for row in self.batch.rows:
            if row.sample:
                positions = range(row.start + len(row.token_ids))
                read = [self.cells[row.block_table[p // SIZE] * SIZE + p % SIZE] for p in positions]
                sampled.append(SampledRow(row.request_id, next_token(read)))
        return sampled


class Faults:
    """What the disk does to a call: nothing most of the time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_damaged = 0

    def read(self, data: memoryview) -> None:
        kind = self.rng.random()
        if kind < 0.01:
            data[self.rng.randrange(len(data) // 4096) * 4096 + self.rng.randrange(4)] ^= 1 << self.rng.randrange(8)
            self.num_damaged += 1
        elif kind < 0.02:
            raise OSError(errno.EIO, "Input/output error")
        elif kind < 0.025:
            time.sleep(0.02)

    def write(self, data: memoryview) -> None:
        if self.rng.random() < 0.002:
            raise OSError(errno.ENOSPC, "No space left on device")


def make_core(directory: Path, disk: Any, rng: random.Random) -> tuple[EngineCore, TokenMemory]:
    config = EngineConfig(
        block_size=SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=6, max_num_batched_tokens=20, max_model_len=64
    )
    memory, faults, record = TokenMemory(), Faults(rng), record_bytes(SIZE)
    disk.on_read, disk.on_write = faults.read, faults.write
    tier = DiskTier([SegmentStore(directory, 64 * record, 8 * record, disk)], clock=lambda: 0.0)
    tier.open()
    cost = TransferCost(num_readers=2, block_seconds=1e-4, token_seconds=1.0)
    transfers = Transfers(tier, memory, cost, num_write_slots=8)
    return EngineCore(config, memory, transfers=transfers, check=True), memory


@pytest.mark.parametrize("seed", range(4))
def test_2_500_random_events_over_all_tiers_keep_every_answer_right(seed: int, tmp_path: Path, disk: Any) -> None:
    """Arrivals, aborts, preemptions, evictions, failing steps, restarts, damaged, late and refused blocks: `check()`
    after every step, and every finished answer is the right one."""
    rng = random.Random(seed)
    core, memory = make_core(tmp_path, disk, rng)
    stems = [tuple(rng.randrange(VOCABULARY) for _ in range(40)) for _ in range(6)]
    alive: dict[str, Request] = {}
    num_finished = num_loaded = 0

    def settle(results: list[Request]) -> None:
        nonlocal num_finished
        for request in results:
            alive.pop(request.request_id, None)
            if request.finish_reason is FinishReason.LENGTH:
                num_finished += 1
                assert request.output_token_ids == expected(request.prompt_token_ids, request.params.max_tokens)

    for event in range(2_500):
        kind = rng.random()
        if kind < 0.25 and len(alive) < 16:
            prompt = rng.choice(stems)[: rng.randrange(1, 40)] + tuple(rng.randrange(VOCABULARY) for _ in range(3))
            params = SamplingParams(max_tokens=rng.randrange(1, 12), temperature=0)
            priority = rng.choice(list(PriorityClass))
            added = Request(f"r{event}", prompt, params, ROOT, priority=priority, arrival_seconds=float(event))
            core.add(added)
            alive[added.request_id] = added
        elif kind < 0.32 and alive:
            core.abort(alive.pop(rng.choice(list(alive))).request_id)
        elif kind < 0.38 and alive:
            core.preempt_if_running(rng.choice(list(alive)))
        elif kind < 0.42:
            core.cache.pool.evict_all()
        elif kind < 0.43:
            memory.fail_next = True
        elif kind < 0.432:
            for request_id in list(alive):
                core.abort(alive.pop(request_id).request_id)
            assert core.cache.cold is not None
            num_loaded += core.cache.cold.loaded_blocks
            core.close()
            core, memory = make_core(tmp_path, disk, rng)
        core.scheduler.check()
        settle(core.step().finished)
    deadline = time.monotonic() + 20
    while core.has_work and time.monotonic() < deadline:
        settle(core.step().finished)
    assert not core.has_work, core.scheduler
    cold = core.cache.cold
    assert cold is not None
    num_loaded += cold.loaded_blocks
    core.close()
    core.cache.pool.evict_all()
    core.scheduler.check()
    assert core.cache.pool.num_used == 0 and cold.num_loading_blocks == 0
    assert num_finished > 50 and num_loaded > 20, (num_finished, num_loaded)
    assert cold.cost.decisions[GateDecision.LOAD] > 0
