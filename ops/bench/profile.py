"""Where the time of a step goes, by operation: a decode step of many streams and a prefill step.

python ops/bench/profile.py --dtype bf16 --kernels cpu-native --streams 64 --context 180
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# this file must not hide the packages of the same names: its folder goes to the end of the search path
HERE = str(Path(__file__).parent)
sys.path = [entry for entry in sys.path if entry != HERE] + [str(Path(__file__).parents[2]), HERE]

from steps import BLOCK_SIZE, filled_cache, least_step, rows_of  # noqa: E402

from engine.cache.spec import KV_DTYPES  # noqa: E402 (the path is set above)
from engine.checkpoint.bundled import bundled_model_path  # noqa: E402
from engine.models import load_model  # noqa: E402
from kernels.select import KERNELS, select_kernels  # noqa: E402

NUM_STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16", "int8"])
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", *KV_DTYPES])
    parser.add_argument("--kernels", default=None, choices=sorted(KERNELS))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--context", type=int, default=180)
    parser.add_argument("--prefill", type=int, default=1024, help="tokens of the prefill step, in sequences of 128")
    options = parser.parse_args()
    kernels = select_kernels("cpu", prefer=options.kernels)
    model = load_model(bundled_model_path(), dtype=options.dtype, kernels=kernels)
    decode = rows_of(options.streams, 1, options.context)
    prefill = rows_of(max(1, options.prefill // 128), min(128, options.prefill), min(128, options.prefill))
    num_blocks = options.streams * (options.context // BLOCK_SIZE + 2) + 128
    cache = filled_cache(model, num_blocks, options.streams, options.kv_cache_dtype)
    form = f"{options.dtype}, KV {options.kv_cache_dtype}"
    print(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {form}, {kernels.name}, {kernels.note}")
    with torch.inference_mode():
        for name, inputs in (("decode", decode), ("prefill", prefill)):
            for _ in range(3):
                model.forward(inputs, cache)
            step = least_step(model, inputs, cache)
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                for _ in range(NUM_STEPS):
                    model.forward(inputs, cache)
            print(f"\n{name}: {len(inputs.token_ids)} tokens, {step * 1e3:.1f} ms the fastest step")
            events = sorted(profiled.key_averages(), key=lambda event: -event.self_cpu_time_total)
            total = sum(event.self_cpu_time_total for event in events)
            for event in events[:12]:
                share = event.self_cpu_time_total / total
                print(f"  {event.key:40} {share:6.1%} {share * step * 1e3:8.2f} ms {event.count // NUM_STEPS:6} calls")


if __name__ == "__main__":
    main()
