"""The simulator runs the real scheduler and cache on a trace, and the recording tells work from repeated work."""

import argparse
import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from engine.batch import SampledRow, ScheduledBatch
from engine.core import EngineCore

BENCH_MODULES = ("traces", "virtual", "simulate", "recording")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """120 requests of 20 conversations, which come back with a longer past."""
    rng, lines = random.Random(1), []
    pasts: dict[int, list[int]] = {}
    for number in range(120):
        past = pasts.setdefault(rng.randrange(20), [])
        past += range(1000 * number, 1000 * number + rng.randrange(1, 4))
        tokens = 512 * len(past) - rng.randrange(300)
        row = {"timestamp": 200 * number, "input_length": tokens, "output_length": 5, "hash_ids": list(past)}
        lines.append(json.dumps(row))
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines))
    return file


def options(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{"block_size": 256, "max_num_seqs": 8, "ssd_tokens": 600_000, **changes})


def test_no_tier_hits_more_than_a_cache_without_end_and_a_large_one_comes_near(
    bench: dict[str, ModuleType], trace: Path
) -> None:
    """Hits grow with L2, an SSD adds what memory has lost, and second touch writes less of it. With much room
    its default does what writing everything does, with little it writes less."""
    simulate, traces = bench["simulate"], bench["traces"]
    requests = traces.read_trace(trace, limit=120, speed=1.0)
    bound = 100 * traces.infinite_cache_ratio(requests, 256)
    rows = {
        (l2, tier): simulate.replay(requests, options(), l2, tier, simulate.Policy())
        for l2, tier in ((30_000, "no SSD"), (30_000, "LRU"), (30_000, "second-touch"), (800_000, "no SSD"))
    }
    total = {key: row["hit L2 %"] + row["hit SSD %"] for key, row in rows.items()}
    assert all(0 < hits <= bound + 1e-6 for hits in total.values())
    assert total[800_000, "no SSD"] > 0.9 * bound
    assert total[30_000, "no SSD"] < total[30_000, "LRU"]
    assert rows[30_000, "second-touch"]["SSD written blocks"] < rows[30_000, "LRU"]["SSD written blocks"]
    assert total[30_000, "no SSD"] < total[800_000, "no SSD"]
    roomy, tight = (
        simulate.replay(requests, options(ssd_tokens=tokens), 30_000, "room", simulate.Policy())
        for tokens in (2_000_000, 200_000)
    )
    assert roomy["hit L2 %"] + roomy["hit SSD %"] == total[30_000, "LRU"]
    assert tight["SSD written blocks"] < roomy["SSD written blocks"]


def test_blocks_of_a_trace_are_cut_to_the_blocks_of_the_engine(bench: dict[str, ModuleType]) -> None:
    """Two prompts share what their ids share, in blocks of any size that divides 512; only full ones have a hash."""
    make = bench["traces"].TraceRequest
    one, two = make(0, 0.0, 1100, 1, (7, 8, 9)), make(1, 0.0, 1030, 1, (7, 8, 5))
    for size in (512, 256, 16):
        first, second = one.block_hashes(size), two.block_hashes(size)
        assert len(first) == 1100 // size and len(second) == 1030 // size
        assert first[: 1024 // size] == second[: 1024 // size] and len(set(first)) == len(first)
    with pytest.raises(ValueError, match="512"):
        one.block_hashes(100)


def test_work_that_is_done_again_is_no_new_work(bench: dict[str, ModuleType]) -> None:
    """A preempted document's tokens count once; a step inside another one is taken out of its time."""
    recording = bench["recording"]
    core = simple_core(recording)
    core.step()
    core.preempt_if_running("bulk")
    core.cache.pool.evict_all()
    while core.has_work:
        core.step()
    steps = core.runner.steps  # type: ignore[attr-defined]
    assert sum(step.num_new for step in steps) == 12 + 3
    assert sum(step.num_again for step in steps) == 12
    assert recording.chunk_in_flight(steps, steps[0].began, 12) and not recording.chunk_in_flight(steps, 0.0, 1)


def simple_core(recording: ModuleType) -> EngineCore:
    from engine.config import EngineConfig
    from engine.request import Request
    from engine.sampling_params import SamplingParams

    class Runner:
        def segments(self, batch: ScheduledBatch) -> list[tuple[int, int]]:
            return [(0, 1)]

        def launch(self, batch: ScheduledBatch, layers: tuple[int, int]) -> None:
            self.batch = batch

        def sample(self) -> None:
            pass

        def collect(self) -> list[SampledRow]:
            return [SampledRow(row.request_id, 1) for row in self.batch.rows if row.sample]

    config = EngineConfig(block_size=4, num_blocks=16, max_num_seqs=2, max_model_len=64)
    core = EngineCore(config, recording.RecordingRunner(Runner()))
    core.add(Request("bulk", tuple(range(12)), SamplingParams(max_tokens=4, temperature=0), b"root"))
    return core
