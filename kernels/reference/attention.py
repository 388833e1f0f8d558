"""Readable float32 paged attention: one sequence after the other, every key in the order of its position."""

import math

import torch
from torch import Tensor

from kernels.api import AttentionPlan
from kernels.kv import AttentionRows, LayerKV
from kernels.reference.cache import read_blocks


def attention(rows: AttentionRows, cache: LayerKV, plan: AttentionPlan) -> Tensor:
    query = rows.query
    num_heads, head_dim = query.shape[1:]
    out = torch.empty_like(query)
    exact_starts = plan.exact_starts()
    for s, kv_len in enumerate(plan.kv_lens):
        own_rows = slice(plan.query_starts[s], plan.query_starts[s + 1])
        if own_rows.start == own_rows.stop:
            continue
        positions = plan.positions(s)[:, None]
        pages = read_blocks(cache, plan.block_tables[s]).permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, K, M B, D]
        if rows.exact is None:
            keys = torch.arange(kv_len)
            kv, hidden = pages[:, :, :kv_len], keys > positions
        else:
            own_block = positions // plan.block_size * plan.block_size  # where the block of each row begins
            stored, exact = torch.arange(int(own_block[-1])), torch.arange(plan.start_of_block(s), kv_len)
            own = rows.exact[exact_starts[s] : exact_starts[s + 1]].float().permute(1, 2, 0, 3)  # [2, K, X, D]
            kv = torch.cat((pages[:, :, : len(stored)], own), 2)
            hidden = torch.cat((stored >= own_block, (exact < own_block) | (exact > positions)), 1)
        k, v = kv.repeat_interleave(num_heads // kv.shape[1], 1)  # [H, keys, D] each
        scores = query[own_rows].float().transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(head_dim)  # [H, T, keys]
        out[own_rows] = (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1).to(query.dtype)
    return out
