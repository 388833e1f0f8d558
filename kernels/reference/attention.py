"""Readable float32 paged attention: one sequence after the other, every key in the order of its position."""

import math

import torch
from torch import Tensor

from kernels.api import AttentionPlan


def write_kv(key: Tensor, value: Tensor, cache: Tensor, layer: int, plan: AttentionPlan) -> None:
    for t, slot in enumerate(plan.slots.tolist()):
        block, offset = divmod(slot, plan.block_size)
        cache[block, layer, 0, :, offset] = key[t]
        cache[block, layer, 1, :, offset] = value[t]


def attention(query: Tensor, cache: Tensor, layer: int, plan: AttentionPlan) -> Tensor:
    num_heads, head_dim = query.shape[1:]
    out = torch.empty_like(query)
    for s, kv_len in enumerate(plan.kv_lens):
        rows = slice(plan.query_starts[s], plan.query_starts[s + 1])
        pages = cache[plan.block_tables[s], layer].float()  # [M, 2, K, B, D]
        k, v = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :kv_len]  # [K, kv_len, D] each
        group = num_heads // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)  # [H, kv_len, D]
        scores = query[rows].float().transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(head_dim)  # [H, T, kv_len]
        future = torch.arange(kv_len) > plan.positions(s)[:, None]
        out[rows] = (scores.masked_fill(future, -math.inf).softmax(-1) @ v).transpose(0, 1).to(query.dtype)
    return out
