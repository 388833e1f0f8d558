"""Steps of a model as the engine runs them, made up for a measurement: rows of sequences over a filled KV cache."""

import time
from collections.abc import Callable

import torch

from engine.inputs import ModelInputs
from engine.kv_memory import KVCacheMemory
from engine.models.layers import Model

BLOCK_SIZE = 16


def rows_of(num_seqs: int, query_len: int, kv_len: int) -> ModelInputs:
    """The last `query_len` tokens of sequences of `kv_len`, each in blocks of its own."""
    num_blocks = -(-kv_len // BLOCK_SIZE)
    num_rows = num_seqs * query_len
    return ModelInputs(
        token_ids=torch.arange(num_rows) % 1000 + 100,
        positions=torch.arange(kv_len - query_len, kv_len).repeat(num_seqs),
        query_starts=list(range(0, num_rows + 1, query_len)),
        kv_lens=[kv_len] * num_seqs,
        block_tables=torch.arange(num_seqs * num_blocks).view(num_seqs, num_blocks),
        tail_slots=list(range(num_seqs)),
        logit_rows=torch.arange(query_len - 1, num_rows, query_len),
        block_size=BLOCK_SIZE,
    )


def filled_cache(model: Model, num_blocks: int, num_seqs: int, dtype: str = "auto") -> KVCacheMemory:
    """Memory that was written to: pages that never were are all one page of zeros, which no memory need be read for."""
    cache = KVCacheMemory(model.cache_spec(BLOCK_SIZE, dtype), num_blocks, num_seqs)
    for layer in cache.layers:
        layer.body[:] = torch.randn(layer.body.shape[1:]).to(layer.body.dtype)
        if layer.scales is not None:
            layer.scales.fill_(0.05)
    return cache


@torch.inference_mode()
def least_step(model: Model, inputs: ModelInputs, cache: KVCacheMemory, seconds: float = 1.0) -> float:
    """Seconds of the fastest of the steps that fit into a time, three at least: neighbours can only slow one down."""
    return fastest(lambda: model.forward(inputs, cache), seconds)


def fastest(work: Callable[[], object], seconds: float, tries: int = 3) -> float:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < tries or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
