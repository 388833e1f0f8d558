"""What a token costs of a sequence that is twice as long as the KV memory, beside the same one that lies in memory.

python ops/bench/long_sequence.py --memory-blocks 64 --tokens 48

Both have the same prompt and chunks; their steps take turns. Prints nothing where the tokens differ.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-blocks", type=int, default=64, help="of 16 tokens; the sequence has twice as many")
    parser.add_argument("--tokens", type=int, default=48, help="of the answer")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "int8"])
    parser.add_argument("--directory", type=Path, default=Path("out/bench/long"), help="on the disk to measure")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        compare(options, directory)
    finally:
        shutil.rmtree(directory)


def compare(options: argparse.Namespace, directory: Path) -> None:
    from workloads import corpus

    from engine.checkpoint.bundled import bundled_model_path
    from engine.config import ColdConfig, EngineConfig
    from engine.models import load_model
    from engine.text.tokenizer import load_tokenizer

    model = load_model(bundled_model_path(), dtype="bf16")
    num_tokens = 2 * 16 * options.memory_blocks
    prompt = tuple(corpus(load_tokenizer(bundled_model_path()).encode_text)[: num_tokens - options.tokens])
    resident = EngineConfig(
        num_blocks=2 * options.memory_blocks + 2,
        max_num_seqs=4,
        max_model_len=num_tokens,
        prefill_chunk_size=options.memory_blocks // 4 * 16,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    streamed = replace(resident, num_blocks=options.memory_blocks, cold=ColdConfig((directory,), 1 << 30))
    one = {
        name: Run(model, config, prompt, options.tokens)
        for name, config in {"in memory": resident, "streamed": streamed}.items()
    }
    while any(run.core.has_work for run in one.values()):
        for run in one.values():
            run.step()
    first, second = one.values()
    if first.request.output_token_ids != second.request.output_token_ids:
        raise SystemExit("the tokens differ: no figures")
    cold = second.core.stats().cold
    num_cold = options.memory_blocks * 2 - len(second.last_blocks)
    print(
        f"{num_tokens} tokens of {options.kv_cache_dtype} KV, {options.memory_blocks} blocks of memory, "
        f"{num_cold} blocks on the SSD at the end; {cold.streamed_bytes_total / 2**20:.0f} MiB streamed in all"
    )
    print("| | prefill s | decode ms (median) | decode ms (p90) | tokens/s |\n|---|---|---|---|---|")
    for name, run in one.items():
        middle = statistics.median(run.decodes)
        p90 = sorted(run.decodes)[int(0.9 * len(run.decodes))]
        print(f"| {name} | {run.prefill:.2f} | {middle * 1e3:.1f} | {p90 * 1e3:.1f} | {1 / middle:.1f} |")
    for run in one.values():
        run.core.close()


class Run:
    """One request on one core; `decodes` are the seconds of its steps of one token."""

    def __init__(self, model: Any, config: Any, prompt: tuple[int, ...], num_tokens: int) -> None:
        from engine.cache.block import root_hash
        from engine.cache.opening import open_transfers
        from engine.core import EngineCore
        from engine.request import Request
        from engine.runner import TorchRunner
        from engine.sampling_params import SamplingParams

        runner = TorchRunner(model, config)
        transfers = None if config.cold is None else open_transfers(config.cold, runner.cache)
        self.core = EngineCore(config, runner, transfers=transfers)
        self.core.warm_up()
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        self.request = Request("long", prompt, params, root_hash(tenant="", model_digest="m", layout_id="l"))
        self.core.add(self.request)
        self.prefill, self.decodes = 0.0, list[float]()
        self.last_blocks: list[Any] = []

    def step(self) -> None:
        """Until the sequence has got on; waiting for the SSD to have written counts."""
        if not self.core.has_work:
            return
        began, was_decoding = time.perf_counter(), self.request.is_decoding
        before = self.request.num_computed_tokens, len(self.request.output_token_ids)
        while (self.request.num_computed_tokens, len(self.request.output_token_ids)) == before:
            self.core.step()
            self.last_blocks = list(self.request.blocks) or self.last_blocks
        seconds = time.perf_counter() - began
        if was_decoding:
            self.decodes.append(seconds)
        else:
            self.prefill += seconds


if __name__ == "__main__":
    here = str(Path(__file__).parent)  # the file `engine.py` here must not hide the package
    sys.path = [entry for entry in sys.path if entry != here] + [str(Path(__file__).parents[2]), here]
    main()
