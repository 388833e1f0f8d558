"""Neighbours behind one prefix are found, and nobody is asked to look ahead of itself."""

from itertools import accumulate

import torch

from kernels.api import AttentionPlan
from kernels.cpu.sharing import SharedGroup, shared_groups

SIZE = 4
PREFIX = [7, 3, 9, 5, 1, 8]


def plan_of(sequences: list[tuple[int, int, list[int]]]) -> AttentionPlan:
    """(query length, length, block table) of each sequence."""
    query_lens, kv_lens, tables = zip(*sequences, strict=True)
    width = max(map(len, tables))
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables])
    none = torch.empty(0)
    return AttentionPlan([0, *accumulate(query_lens)], list(kv_lens), padded, none, SIZE, none, none)


def test_neighbours_behind_one_prefix_are_a_group() -> None:
    """As long as what all of them share, whatever follows it."""
    behind = [(1, 27, [*PREFIX, 20 + s]) for s in range(3)]
    assert shared_groups(plan_of([(1, 5, [40, 41]), *behind, (1, 9, [50, 51, 52])])) == [SharedGroup(1, 3, 6)]


def test_a_query_inside_the_prefix_shortens_or_leaves_the_group() -> None:
    """Only blocks before every query of a member count: they were complete before this step's causal edge."""
    one, other = (1, 25, [*PREFIX, 20]), (1, 25, [*PREFIX, 21])
    assert shared_groups(plan_of([one, other, (3, 23, PREFIX)])) == [SharedGroup(0, 3, 5)]
    assert shared_groups(plan_of([one, other, (24, 24, PREFIX)])) == [SharedGroup(0, 2, 6)]


def test_short_prefixes_and_single_sequences_share_nothing() -> None:
    """Below four blocks the second pass does not pay."""
    assert shared_groups(plan_of([(1, 14, [*PREFIX[:3], 20]), (1, 14, [*PREFIX[:3], 21])])) == []
    assert shared_groups(plan_of([(1, 25, [*PREFIX, 20])])) == []


def test_a_much_shorter_prefix_opens_a_new_group() -> None:
    """Two families of prompts with a common start stay two groups."""
    long = [*PREFIX, 10, 11, 12, 13, 14, 15]
    first = [(1, 49, [*long, 20 + s]) for s in range(2)]
    second = [(1, 49, [*PREFIX[:4], 30, 31, 32, 33, 34, 35, 36, 37, 40 + s]) for s in range(2)]
    assert shared_groups(plan_of([*first, *second])) == [SharedGroup(0, 2, 12), SharedGroup(2, 2, 12)]
