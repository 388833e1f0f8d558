"""Readable forms of the KV cache: how a full block is rounded, read back, and where the rows of a step go."""

import torch
from torch import Tensor

from kernels.api import AttentionPlan
from kernels.kv import LayerKV

LEVELS = 127  # symmetric, so that zero is exact and a negated row is the negated code
SMALLEST_SCALE, LARGEST = 2.0**-24, 65504.0  # of float16


def quantise_kv(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """[..., D] -> int8 codes [..., D] and float16 scales [..., C], one for `group_size` channels.

    scale = amax / 127 rounded up, so that no code is clamped and the error is at most half a scale (where the scale
    itself is not clamped); code = x / scale, half to even. Zero is exact; finite rows give finite ones.
    """
    scales, codes = [], []
    for group in torch.split(x.float(), group_size, -1):
        exact = group.abs().amax(-1, keepdim=True) / LEVELS
        scale = round_up(exact).clamp(SMALLEST_SCALE, LARGEST)
        scales.append(scale)
        codes.append((group / scale.float()).round().clamp(-LEVELS, LEVELS).to(torch.int8))
    return torch.cat(codes, -1), torch.cat(scales, -1)


def round_up(x: Tensor) -> Tensor:
    """Float32, not negative, to the next float16 that is not below it; infinity above the largest."""
    nearest = x.half()
    above = (nearest.view(torch.int16) + 1).view(torch.float16)
    return torch.where(nearest.float() < x, above, nearest)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A dense form of what a block holds; float16 ends at its largest number instead of infinity."""
    return x.clamp(-LARGEST, LARGEST).to(dtype) if dtype is torch.float16 else x.to(dtype)


def read_blocks(cache: LayerKV, blocks: Tensor) -> Tensor:
    """float32 [..., 2, K, B, D] of blocks [...] as they are stored."""
    values = cache.body[blocks].float()
    if cache.scales is None:
        return values
    scales = cache.scales[blocks].float().repeat_interleave(cache.group_size, -1)  # [..., 2, K, B, at least D]
    return values * scales[..., : values.shape[-1]]


def write_kv(key: Tensor, value: Tensor, cache: LayerKV, plan: AttentionPlan) -> Tensor | None:
    """Store rows [T, K, D] and give what `AttentionRows.exact` asks for. Blocks that the rows fill are rounded here,
    from compute dtype, before any row of the step attends to them."""
    rows = torch.stack((key, value), 1).to(cache.compute_dtype)  # [T, 2, K, D]
    if cache.tail is None:
        for row, slot in zip(rows, plan.slots.tolist(), strict=True):
            block, offset = divmod(slot, plan.block_size)
            cache.body[block, :, :, offset] = row
        return None
    exact = []
    for s, tail_slot in enumerate(plan.tail_slots):
        new = rows[plan.query_starts[s] : plan.query_starts[s + 1]].permute(1, 2, 0, 3)  # [2, K, T, D]
        if new.shape[2] == 0:
            continue
        first, num_old = divmod(plan.start(s), plan.block_size)
        waiting = cache.tail[tail_slot]  # [2, K, B - 1, D]
        open_rows = torch.cat((waiting[:, :, :num_old], new), 2)  # copied, so the tail may change below
        exact.append(open_rows.permute(2, 0, 1, 3))
        for page, block in zip(torch.split(open_rows, plan.block_size, 2), plan.block_tables[s, first:], strict=False):
            if page.shape[2] < plan.block_size:
                waiting[:, :, : page.shape[2]] = page
            elif cache.scales is None:
                cache.body[block] = stored(page, cache.body.dtype)
            else:
                cache.body[block], cache.scales[block] = quantise_kv(page, cache.group_size)
    return torch.cat(exact)
