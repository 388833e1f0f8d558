"""Decode attention of one layer over a bf16 and over an int8 cache, in turn in one process; the least of many calls.

python ops/bench/kv_speed.py --streams 64 --contexts 256,1024

The sizes are SmolLM2's. Times are of the process's CPU clock, which neighbours disturb less than the wall's.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

# this file must not hide the packages of the same names: its folder goes to the end of the search path
HERE = str(Path(__file__).parent)
sys.path = [entry for entry in sys.path if entry != HERE] + [str(Path(__file__).parents[2]), HERE]

from engine.cache.spec import CacheSpec, KVDtype  # noqa: E402 (the path is set above)
from engine.kv_memory import KVCacheMemory  # noqa: E402
from kernels.api import AttentionPlan, Kernels  # noqa: E402
from kernels.kv import AttentionRows, LayerKV  # noqa: E402
from kernels.select import select_kernels  # noqa: E402

BLOCK_SIZE, NUM_LAYERS, NUM_KV_HEADS, GROUP, HEAD_DIM = 16, 30, 3, 3, 64


class Decode:
    """A decode step of many streams over a cache of one form; each call is the next layer's, as in a model."""

    def __init__(self, kernels: Kernels, dtype: KVDtype, num_streams: int, context: int) -> None:
        num_blocks = -(-context // BLOCK_SIZE)
        spec = CacheSpec((dtype,) * NUM_LAYERS, "bf16", NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        self.memory = KVCacheMemory(spec, num_streams * num_blocks, num_streams)
        for layer in self.memory.layers:
            layer.body.fill_(1)
            if layer.scales is not None:
                layer.scales.fill_(0.01)
        tables = torch.randperm(num_streams * num_blocks).view(num_streams, num_blocks)
        last = tables[:, (context - 1) // BLOCK_SIZE] * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
        angles = torch.zeros(num_streams, HEAD_DIM // 2)
        starts, slots = list(range(num_streams + 1)), list(range(num_streams))
        self.plan = AttentionPlan(
            starts, [context] * num_streams, tables, last, BLOCK_SIZE, angles.cos(), angles.sin(), slots
        )
        self.qkv = torch.randn(num_streams, (GROUP + 2) * NUM_KV_HEADS * HEAD_DIM).bfloat16()
        self.kernels, self.best = kernels, [float("inf"), float("inf")]

    def run(self) -> None:
        for layer in self.memory.layers:
            rows = self._timed(0, layer)
            started = time.process_time()
            self.kernels.attention(rows, layer, self.plan)
            self.best[1] = min(self.best[1], time.process_time() - started)

    def _timed(self, what: int, layer: LayerKV) -> AttentionRows:
        started = time.process_time()
        rows = self.kernels.rotary_write_kv(self.qkv, None, layer, self.plan)
        self.best[what] = min(self.best[what], time.process_time() - started)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--contexts", default="256,1024")
    parser.add_argument("--repetitions", type=int, default=10, help="times all layers")
    options = parser.parse_args()
    kernels = select_kernels("cpu")
    print(f"{torch.get_num_threads()} threads, {kernels.note}, {options.streams} streams")
    for context in map(int, options.contexts.split(",")):
        forms: dict[KVDtype, Decode] = {
            form: Decode(kernels, form, options.streams, context) for form in ("bf16", "int8")
        }
        with torch.inference_mode():
            for _ in range(options.repetitions):
                for decode in forms.values():
                    decode.run()
        for form, decode in forms.items():
            write, attend = (1e6 * seconds for seconds in decode.best)
            print(f"context {context}, KV {form}: write {write:.0f}, attention {attend:.0f} CPU us a layer", flush=True)


if __name__ == "__main__":
    main()
