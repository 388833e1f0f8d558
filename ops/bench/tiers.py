"""The SSD tier: worth its memory, harmless on a slow disk, as fast as the disk.

python ops/bench/tiers.py --parts conversations,half,gate,direct --repetitions 3 --out out/bench

Variants of a part share the model and take turns: one turn of every conversation each. Prints tables and writes JSON.
"""

import argparse
import json
import platform
import random
import shutil
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from percentiles import percentile, percentiles

NUM_READERS = 2
AGREEMENT = 0.8
"""Of the first answers' first tokens, what has to be the same in all variants (bf16 sums depend on batch mates)."""
SLOW_BYTES_PER_SECOND = 5e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="conversations,half,gate,direct")
    parser.add_argument(
        "--model", default="smollm2", choices=["smollm2", "tiny"], help="tiny: random, 4 million weights"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--gate-repetitions", type=int, default=5)
    parser.add_argument("--slow-from-turn", type=int, default=1, help="of the gate's conversations; before, it is fast")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=60, help="of a turn; each repeats all before it")
    parser.add_argument("--write-slots", type=int, default=12, help="blocks that may wait to be written to the SSD")
    parser.add_argument("--memory-blocks", type=int, default=96, help="with the SSD on, buffers come out of them")
    parser.add_argument("--directory", type=Path, default=Path("out/bench/l3"), help="on the disk to measure")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.directory.mkdir(parents=True, exist_ok=True)
    parts = options.parts.split(",")
    report: dict[str, Any] = {"machine": f"{platform.machine()}, {platform.processor()}", "command": sys.argv}
    if "direct" in parts:
        from disk_reads import compare

        report["direct"] = compare(options.directory)
    if set(parts) - {"direct"}:
        bench = Bench(options)
        for part in parts:
            if part != "direct":
                report[part] = getattr(bench, part)()
    shutil.rmtree(options.directory)
    (options.out / "tiers.json").write_text(json.dumps(report, indent=1))


class Bench:
    """One small model for all parts."""

    def __init__(self, options: argparse.Namespace) -> None:
        from conversations import Shape
        from tiny_model import VOCABULARY, write_checkpoint
        from workloads import corpus

        from engine.checkpoint.bundled import bundled_model_path
        from engine.config import EngineConfig
        from engine.models import load_model
        from engine.text.tokenizer import load_tokenizer

        self._options = options
        self._slow_disks: list[Any] = []
        if options.model == "tiny":
            self._model = load_model(write_checkpoint(options.out / "tiny"), dtype="bf16")
            rng = random.Random(1)
            self._corpus = [rng.randrange(VOCABULARY) for _ in range(100_000)]
        else:
            self._model = load_model(bundled_model_path(), dtype="bf16")
            self._corpus = corpus(load_tokenizer(bundled_model_path()).encode_text)
        self._shape = Shape(options.conversations, num_new_tokens=options.new_tokens)
        self._base = EngineConfig(
            num_blocks=self._options.memory_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=512,
            max_model_len=max(1024, self._shape.num_tokens),
        )

    def _cold(self, **changes: Any) -> Any:
        """A tier in a directory of its own, large enough for everything."""
        from engine.config import ColdConfig

        directory = Path(tempfile.mkdtemp(dir=self._options.directory))
        cold = ColdConfig((directory,), 1 << 30, num_write_slots=self._options.write_slots, num_readers=NUM_READERS)
        return replace(cold, **changes)

    def _core(self, memory_blocks: int, cold: Any = None, disk: Any = None) -> Any:
        from conversations import new_core

        buffers = self._options.write_slots + NUM_READERS if cold is not None else 0
        return new_core(self._model, replace(self._base, num_blocks=memory_blocks - buffers, cold=cold), disk)

    def _interleaved(self, cores: dict[str, Any], measured: dict[str, Any]) -> float:
        """All turns on every core, turn by turn; returns the share of answers' first tokens that agree with the first
        core's."""
        from conversations import Talk

        talks = {name: Talk(core, self._corpus, self._shape, name) for name, core in cores.items()}
        names = list(talks)
        for turn in range(self._shape.num_turns):
            for disk in self._slow_disks:
                disk.is_slow = turn + 1 >= self._options.slow_from_turn
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                measured[name].add(talks[name].run(1))
            print(f"  turn {turn + 1} of {self._shape.num_turns} done", file=sys.stderr, flush=True)
        for name, core in cores.items():
            self._tell(name, core.stats().cold)
            core.close()
        first, *others = [talk.histories for talk in talks.values()]
        at = self._shape.num_new_tokens
        pairs = [(a[at], b[at]) for other in others for a, b in zip(first, other, strict=True)]
        return sum(a == b for a, b in pairs) / len(pairs)

    @staticmethod
    def _tell(name: str, cold: Any) -> None:
        if cold is not None:
            decided = ", ".join(f"{what} {count}" for what, count in cold.gate_decisions.items())
            print(
                f"  {name}: decided {decided}; {cold.loads_total} loads, {cold.late_loads_total} late; "
                f"{cold.dropped_writes_total} writes dropped; "
                f"written twice {cold.rewritten_bytes_total / max(1, cold.written_bytes_total):.0%}",
                flush=True,
            )

    def conversations(self) -> dict[str, Any]:
        """Equal memory, SSD off beside on with all admissions."""
        from engine.cache.cold_admission import ColdAdmission

        def ssd(admission: ColdAdmission) -> Any:
            return self._core(self._options.memory_blocks, self._cold(admission=admission))

        return self._compare(
            "working set beyond the memory, equal memory",
            {
                "off": lambda: self._core(self._options.memory_blocks),
                "on, room": lambda: ssd(ColdAdmission.ROOM),
                "on, second touch": lambda: ssd(ColdAdmission.SECOND),
                "on, first touch": lambda: ssd(ColdAdmission.FIRST),
            },
            self._options.repetitions,
        )

    def half(self) -> dict[str, Any]:
        """A memory and the SSD beside twice the memory without."""
        return self._compare(
            "half the memory with the SSD beside the whole without",
            {
                "whole, off": lambda: self._core(2 * self._options.memory_blocks),
                "half, room": lambda: self._core(self._options.memory_blocks, self._cold()),
            },
            self._options.repetitions,
        )

    def gate(self) -> dict[str, Any]:
        """A disk of 5 MB/s. Off twice, for the spread of off against off."""
        from slow_disk import SlowDisk

        from engine.cache.cold_admission import ColdAdmission

        self._shape = replace(self._shape, num_conversations=8)

        def slowed(**changes: Any) -> Any:
            cold = self._cold(admission=ColdAdmission.FIRST, **changes)
            disk = SlowDisk(SLOW_BYTES_PER_SECOND, is_slow=self._options.slow_from_turn == 1)
            self._slow_disks.append(disk)
            return self._core(self._options.memory_blocks + self._options.write_slots + NUM_READERS, cold, disk)

        return self._compare(
            f"disk slowed to 5 MB/s from turn {self._options.slow_from_turn} on",
            {
                "off": lambda: self._core(self._options.memory_blocks),
                "off again": lambda: self._core(self._options.memory_blocks),
                "gate and deadline": slowed,
                "gate, no deadline": lambda: slowed(has_deadline=False),
            },
            self._options.gate_repetitions,
        )

    def _compare(self, title: str, makers: dict[str, Any], repetitions: int) -> dict[str, Any]:
        from conversations import Measured

        measured = {name: Measured() for name in makers}
        runs: dict[str, list[Measured]] = {name: [] for name in makers}
        for _ in range(repetitions):
            one = {name: Measured() for name in makers}
            agreement = self._interleaved({name: make() for name, make in makers.items()}, one)
            if agreement < AGREEMENT:
                raise SystemExit(f"{title}: only {agreement:.2f} of the first tokens agree: no figures")
            for name in makers:
                measured[name].add(one[name])
                runs[name].append(one[name])
                print(f"  {name}: p50 {percentile(one[name].first_token_seconds, 50):.3f} s", flush=True)
        print(f"\n{title}: {repetitions} repetitions, {self._shape}")
        print("| | p50 s | p95 s | p99 s | p99 of each run | output tokens/s | from memory | from SSD | computed |")
        print("|---|---|---|---|---|---|---|---|---|")
        rows = {name: row(measured[name], runs[name]) for name in makers}
        for name, cells in rows.items():
            shares = " | ".join(f"{cells[key]:.0%}" for key in ("l2", "l3", "computed"))
            spread = f"{min(cells['p99_runs']):.2f} to {max(cells['p99_runs']):.2f}"
            times = " | ".join(f"{cells[key]:.3f}" for key in ("p50", "p95", "p99"))
            print(f"| {name} | {times} | {spread} | {cells['tokens_per_second']:.1f} | {shares} |", flush=True)
        return rows


def row(all_runs: Any, runs: list[Any]) -> dict[str, Any]:
    """Percentiles of the time to the first token over all runs; the rate is the median of the runs."""
    seconds = all_runs.first_token_seconds
    return {
        **percentiles(seconds),
        "p99_runs": [percentile(run.first_token_seconds, 99) for run in runs],
        "p50_runs": [percentile(run.first_token_seconds, 50) for run in runs],
        "p95_runs": [percentile(run.first_token_seconds, 95) for run in runs],
        "tokens_per_second": statistics.median(run.tokens_per_second for run in runs),
        "l2": all_runs.l2_tokens / all_runs.prompt_tokens,
        "l3": all_runs.l3_tokens / all_runs.prompt_tokens,
        "computed": 1 - (all_runs.l2_tokens + all_runs.l3_tokens) / all_runs.prompt_tokens,
    }


if __name__ == "__main__":
    here = str(Path(__file__).parent)  # the file `engine.py` here must not hide the package
    sys.path = [entry for entry in sys.path if entry != here] + [str(Path(__file__).parents[2]), here]
    main()
