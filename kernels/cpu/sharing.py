"""Which neighbours of a batch begin with the same blocks: what a cascade may read once for all of them."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from kernels.api import AttentionPlan

_MIN_SEQS, _MIN_BLOCKS = 2, 4  # below these a second pass costs more than the reads that it saves


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Sequences first:first + num_seqs of a plan share their leading `num_blocks`, all before every query of theirs."""

    first: int
    num_seqs: int
    num_blocks: int


def shared_groups(
    plan: AttentionPlan, *, min_seqs: int = _MIN_SEQS, min_blocks: int = _MIN_BLOCKS
) -> list[SharedGroup]:
    """Runs of neighbours with a common prefix, from the first sequence on; no group inside another. A neighbour with
    half of the prefix or less opens a new group instead of shortening it."""
    if len(plan.kv_lens) < min_seqs:
        return []
    size, starts = plan.block_size, plan.query_starts
    past = torch.tensor(
        [kv_len - (end - start) for kv_len, (start, end) in zip(plan.kv_lens, pairwise(starts), strict=True)]
    )
    tables, past_blocks = plan.block_tables, past // size
    alike = (tables[1:] == tables[:-1]).to(torch.int64).cumprod(1).sum(1)
    common = torch.minimum(alike, torch.minimum(past_blocks[1:], past_blocks[:-1])).tolist()  # of s and s + 1
    groups, first = [], 0
    while first < len(common):
        last, num_blocks = first, common[first]
        while last < len(common) and common[last] >= min_blocks and 2 * min(num_blocks, common[last]) > num_blocks:
            num_blocks = min(num_blocks, common[last])
            last += 1
        if last > first and last - first + 1 >= min_seqs and num_blocks >= min_blocks:
            groups.append(SharedGroup(first, last - first + 1, num_blocks))
        first = max(last, first) + 1
    return groups
