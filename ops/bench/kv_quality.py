"""What storing the KV cache in another form costs in likelihood, and what it saves in memory.

python ops/bench/kv_quality.py --tokens 20480 --context 1024

Scores the same windows of text with float32 weights through the engine's model, kernels and paged cache: with the cache
in float32, and in the form asked for once in chunks of a block and once token by token. The two must agree, for what is
read is a function of the tokens alone.

The default is 1,024 steps of 20 rows and twice 64 steps of 320, all in float32; all windows run at once, which is the
quickest way there is. On two cores of its own 5 to 10 minutes are expected (not timed).
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch

# this file must not hide the packages of the same names: its folder goes to the end of the search path
HERE = str(Path(__file__).parent)
sys.path = [entry for entry in sys.path if entry != HERE] + [str(Path(__file__).parents[2]), HERE]

from workloads import corpus, windows  # noqa: E402 (the path is set above)

from engine.cache.spec import KV_DTYPES, CacheSpec, KVDtypeChoice  # noqa: E402
from engine.checkpoint.bundled import bundled_model_path  # noqa: E402
from engine.inputs import ModelInputs  # noqa: E402
from engine.kv_memory import KVCacheMemory  # noqa: E402
from engine.models import load_model  # noqa: E402
from engine.models.layers import Model  # noqa: E402
from engine.text.tokenizer import load_tokenizer  # noqa: E402
from kernels.select import select_kernels  # noqa: E402

BLOCK_SIZE, GIB = 16, 1 << 30
LEAST_SHARE, MOST_APART, MOST_LOSS = 0.95, 1e-4, 0.002  # the goals: share read as stored, nats, perplexity


def score(model: Model, pieces: list[list[int]], kv_dtype: KVDtypeChoice, chunk: int) -> float:
    """Nats of all tokens of `pieces` but the first of each; all pieces run at once, `chunk` tokens of each a step."""
    length = len(pieces[0]) - 1
    num_blocks = -(-length // BLOCK_SIZE)
    memory = KVCacheMemory(model.cache_spec(BLOCK_SIZE, kv_dtype), num_blocks * len(pieces), len(pieces))
    tokens, nats = torch.tensor(pieces), 0.0
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        inputs = ModelInputs(
            token_ids=tokens[:, start:end].flatten(),
            positions=torch.arange(start, end).repeat(len(pieces)),
            query_starts=[(end - start) * s for s in range(len(pieces) + 1)],
            kv_lens=[end] * len(pieces),
            block_tables=torch.arange(num_blocks * len(pieces)).view(len(pieces), num_blocks),
            tail_slots=list(range(len(pieces))),
            logit_rows=torch.arange((end - start) * len(pieces)),
            block_size=BLOCK_SIZE,
        )
        logits = model.forward(inputs, memory)
        wanted = tokens[:, start + 1 : end + 1].flatten()
        nats += float(torch.nn.functional.cross_entropy(logits.double(), wanted, reduction="sum"))
    return nats


def share_read_as_stored(length: int) -> float:
    """Of the keys that the queries of a sequence attend to."""
    stored = sum(position // BLOCK_SIZE * BLOCK_SIZE for position in range(length))
    return stored / sum(position + 1 for position in range(length))


def capacity(of: CacheSpec, gib: float, num_tails: int) -> int:
    """Tokens whose KV fits, beside the tails of `num_tails` running sequences."""
    return of.num_blocks_in(int(gib * GIB), num_tails) * BLOCK_SIZE


def streams(of: CacheSpec, gib: float, length: int) -> int:
    """Sequences of `length` tokens that fit at once, each with its tail."""
    return int(gib * GIB) // (-(-length // BLOCK_SIZE) * of.bytes_per_block + of.bytes_per_tail)


def print_capacity(model: Model, kv_dtype: KVDtypeChoice) -> None:
    form, bf16 = (
        CacheSpec((dtype,) * model.spec.num_layers, "bf16", model.spec.num_kv_heads, model.spec.head_dim, BLOCK_SIZE)
        for dtype in (kv_dtype, "bf16")
    )
    print(f"bytes a block of {BLOCK_SIZE} tokens: {kv_dtype} {form.bytes_per_block}, bf16 {bf16.bytes_per_block}; ")
    for gib, tails in ((1, 16), (1, 64), (2, 64), (8, 64)):
        ours, theirs = capacity(form, gib, tails) / gib, capacity(bf16, gib, tails) / gib
        print(f"{gib} GiB, {tails} sequences: tokens per GiB {ours:.0f} / {theirs:.0f} = {ours / theirs:.3f}")
    for length in (512, 1024, 2048):
        ours, theirs = streams(form, 1, length), streams(bf16, 1, length)
        print(f"1 GiB, streams of {length} tokens: {ours} / {theirs} = +{ours / theirs - 1:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--at-once", type=int, default=20, help="windows that run together")
    parser.add_argument("--kv-cache-dtype", default="int8", choices=KV_DTYPES)
    options = parser.parse_args()
    kernels = select_kernels("cpu")
    path = bundled_model_path()
    model = load_model(path, dtype="fp32", kernels=kernels)
    print(f"{os.cpu_count()} cores, {kernels.name}, {kernels.note}")
    print_capacity(model, options.kv_cache_dtype)
    pieces = windows(
        corpus(load_tokenizer(path).encode_text), max(1, options.tokens // options.context), options.context
    )
    runs = {"fp32": ("fp32", BLOCK_SIZE), "by block": (options.kv_cache_dtype, BLOCK_SIZE)}
    runs["by token"] = (options.kv_cache_dtype, 1)
    nats, seconds = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, 0.0)
    num_tokens = 0
    with torch.inference_mode():
        for first in range(0, len(pieces), options.at_once):
            part = pieces[first : first + options.at_once]
            for name, (kv_dtype, chunk) in runs.items():
                started = time.perf_counter()
                nats[name] += score(model, part, kv_dtype, chunk)
                seconds[name] += time.perf_counter() - started
                print(f"  {name}: {len(part)} windows, {seconds[name]:.0f} s", file=sys.stderr, flush=True)
            num_tokens += len(part) * options.context
            mean = {name: total / num_tokens for name, total in nats.items()}
            apart, loss = abs(mean["by block"] - mean["by token"]), mean["by block"] - mean["fp32"]
            figures = ", ".join(f"{name} {mean[name]:.6f} ({seconds[name]:.0f} s)" for name in runs)
            print(f"{num_tokens} tokens: nats {figures}; perplexity {torch.tensor(loss).expm1():+.4%}", flush=True)
    share = share_read_as_stored(options.context)
    print(f"share of attended keys read as {options.kv_cache_dtype}: {share:.4f}, runs {apart:.2e} nats apart")
    missed = [
        f"{what} {value:.5f}, goal {goal}"
        for what, value, goal, held in (
            ("share", share, LEAST_SHARE, share >= LEAST_SHARE),
            ("apart", apart, MOST_APART, apart <= MOST_APART),
            ("loss", loss, MOST_LOSS, loss <= MOST_LOSS),
        )
        if not held
    ]
    if missed:
        raise SystemExit(f"MISSED: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
