"""Native rotation, cache writes and attention against plain torch in float32; what no position owns is NaN."""

import math
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from kernels.api import TOLERANCES
from kernels.cpu.native import NativeOps

DTYPES = [torch.float32, torch.bfloat16]
both_dtypes = pytest.mark.parametrize("dtype", DTYPES)
INT32 = torch.int32
NONE_SHARED = torch.empty(0, 3, dtype=INT32)


class Step:
    """A batch of sequences over a cache of two layers whose unowned memory is NaN; blocks lie in disorder.

    The first `num_shared` blocks of all sequences are the same.
    """

    def __init__(
        self,
        query_lens: list[int],
        kv_lens: list[int],
        *,
        block_size: int = 16,
        num_kv_heads: int = 2,
        group: int = 3,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        num_shared: int = 0,
    ) -> None:
        lengths = [-(-n // block_size) for n in kv_lens]
        num_blocks = num_shared + sum(n - num_shared for n in lengths) + 1
        order = torch.randperm(num_blocks - 1) + 1  # block 0 belongs to nobody
        self.tables = torch.zeros(len(kv_lens), max(lengths), dtype=torch.int64)
        prefix, rest = order[:num_shared], order[num_shared:]
        for table, length in zip(self.tables, lengths, strict=True):
            table[:length] = torch.cat([prefix, rest[: length - num_shared]])
            rest = rest[length - num_shared :]
        shape = num_blocks, 2, 2, num_kv_heads, block_size, head_dim
        self.cache = torch.full(shape, float("nan"), dtype=dtype)
        for table, kv_len in zip(self.tables.tolist(), kv_lens, strict=True):
            slots = [table[p // block_size] * block_size + p % block_size for p in range(kv_len)]
            for slot in slots:
                self.cache[slot // block_size, 1, :, :, slot % block_size] = torch.randn(2, num_kv_heads, head_dim)
        self.query = torch.randn(sum(query_lens), group * num_kv_heads, head_dim).to(dtype)
        self.query_starts, self.kv_lens = [0, *accumulate(query_lens)], kv_lens

    def attend(self, ops: NativeOps, shared: list[tuple[int, int, int]] | None = None) -> Tensor:
        groups = torch.tensor(shared, dtype=INT32) if shared else NONE_SHARED
        starts, lens = (torch.tensor(x, dtype=INT32) for x in (self.query_starts, self.kv_lens))
        return ops.attention(self.query, self.cache[:, 1], starts, lens, self.tables.to(INT32), groups)

    def assert_right(self, ours: Tensor) -> None:
        assert ours.dtype == self.query.dtype
        for s, kv_len in enumerate(self.kv_lens):
            rows = slice(self.query_starts[s], self.query_starts[s + 1])
            if rows.start == rows.stop:
                continue
            twin = attend_one(self.query[rows].float(), self.cache[self.tables[s], 1].float(), kv_len)
            difference = (ours[rows].float() - twin).abs()
            assert not difference.isnan().any()
            assert difference.max() <= TOLERANCES["attention", ours.dtype]


def attend_one(query: Tensor, pages: Tensor, kv_len: int) -> Tensor:
    """The last rows [T, H, D] of a sequence whose pages are [M, 2, K, B, D]."""
    key, value = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :kv_len]  # [K, kv_len, D] each
    num_rows, num_heads, head_dim = query.shape
    key, value = (x.repeat_interleave(num_heads // len(key), 0) for x in (key, value))
    scores = query.transpose(0, 1) @ key.transpose(1, 2) / math.sqrt(head_dim)
    future = torch.ones(num_rows, kv_len).triu(kv_len - num_rows + 1).bool()
    return (scores.masked_fill(future, -math.inf).softmax(-1) @ value).transpose(0, 1)


BATCHES = {
    "decode": ([1] * 5, [1, 2, 17, 64, 300]),
    "a long decode": ([1], [1100]),
    "several rows a sequence": ([2, 3, 1, 2], [2, 65, 64, 700]),
    "prefills": ([1, 2, 3, 65], [1, 2, 3, 65]),
    "chunks": ([40, 65, 7], [40, 200, 90]),
    "a prefill beside decode rows": ([129, 1, 1, 20], [129, 40, 7, 21]),
    "a sequence without rows": ([0, 1, 0, 33], [5, 6, 7, 33]),
}


@both_dtypes
@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("block_size", [4, 16])
@torch.inference_mode()
def test_attention_of_ragged_rows_equals_its_twin(
    ops: NativeOps, dtype: torch.dtype, batch: str, block_size: int
) -> None:
    """For prefill chunks and decode rows of all lengths in one call."""
    torch.manual_seed(0)
    step = Step(*BATCHES[batch], dtype=dtype, block_size=block_size)
    step.assert_right(step.attend(ops))


@both_dtypes
@pytest.mark.parametrize("spread", [1e-3, 20, 4e3, 1e6, 1e9, 1e12, 1e24])
@torch.inference_mode()
def test_scores_of_any_size_are_right(ops: NativeOps, dtype: torch.dtype, spread: float) -> None:
    """Flat ones, such that rise from tile to tile, and such whose differences alone fill a float."""
    torch.manual_seed(12)
    step = Step([150, 1], [400, 300], dtype=dtype)
    step.query[:, :, 1:] = 0  # so that a score has no rounding of its own
    step.query[0::3] *= spread  # beside tokens of another kind
    step.cache[step.tables[0], 1, 0] *= torch.linspace(0.1, 1, len(step.tables[0])).view(-1, 1, 1, 1).to(dtype)
    step.assert_right(step.attend(ops))


@both_dtypes
@torch.inference_mode()
def test_a_key_of_nan_or_infinity_reaches_the_rows_that_see_it(ops: NativeOps, dtype: torch.dtype) -> None:
    """Also where its value is a number; the rows before it are to the bit what they are without it."""
    torch.manual_seed(13)
    nan = torch.tensor([0x7FC0, -0x40], dtype=torch.int16).view(torch.bfloat16)  # of either sign
    for bad in (*nan, float("inf")):
        step = Step([200], [200], num_kv_heads=1, dtype=dtype)
        step.query[:, :, 5] = step.query[:, :, 5].abs() + 1
        without = step.attend(ops)
        step.cache[step.tables[0, 150 // 16], 1, 0, 0, 150 % 16, 5] = bad
        ours = step.attend(ops)
        assert ours[150:].isnan().all()
        assert torch.equal(ours[:150], without[:150])


@both_dtypes
@pytest.mark.parametrize("group", [1, 3, 4, 7, 20])
@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 128])
@torch.inference_mode()
def test_attention_takes_any_head_shape(ops: NativeOps, dtype: torch.dtype, group: int, head_dim: int) -> None:
    """Groups from one head upwards and head dimensions that fill no vector."""
    torch.manual_seed(1)
    step = Step([1, 2, 37], [70, 5, 60], group=group, head_dim=head_dim, dtype=dtype)
    step.assert_right(step.attend(ops))


@both_dtypes
@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [3, 1, 40, 2]])
@torch.inference_mode()
def test_a_shared_prefix_is_read_once_with_the_same_result(
    ops: NativeOps, dtype: torch.dtype, query_lens: list[int]
) -> None:
    """Decode rows and chunks behind five blocks that all share, and in groups of some."""
    torch.manual_seed(2)
    kv_lens = [81, 100, 125, 400]
    step = Step(query_lens, kv_lens, dtype=dtype, num_shared=5)
    for shared in ([(0, 4, 5)], [(0, 4, 4)], [(0, 2, 4), (2, 2, 3)], [(1, 3, 5)], [(0, 1, 0)]):
        reach = all(kv_lens[s] - query_lens[s] >= 16 * n for first, num, n in shared for s in range(first, first + num))
        if reach:
            step.assert_right(step.attend(ops, shared))
        else:
            with pytest.raises(RuntimeError, match="asks inside the blocks"):
                step.attend(ops, shared)


@both_dtypes
@pytest.mark.parametrize("batch", ["decode", "a prefill beside decode rows", "chunks"])
@torch.inference_mode()
def test_a_row_does_not_depend_on_its_batch_mates(ops: NativeOps, dtype: torch.dtype, batch: str) -> None:
    """Each sequence alone gives the very same bits as in the batch, on one thread as on all."""
    torch.manual_seed(3)
    step = Step(*BATCHES[batch], dtype=dtype)
    together, threads = step.attend(ops), torch.get_num_threads()
    for s, kv_len in enumerate(step.kv_lens):
        rows = slice(step.query_starts[s], step.query_starts[s + 1])
        torch.set_num_threads(1)
        try:
            alone = ops.attention(
                step.query[rows].contiguous(),
                step.cache[:, 1],
                torch.tensor([0, rows.stop - rows.start], dtype=INT32),
                torch.tensor([kv_len], dtype=INT32),
                step.tables[s : s + 1].to(INT32),
                NONE_SHARED,
            )
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(alone, together[rows])


@both_dtypes
@pytest.mark.parametrize("group", [3, 7])
@torch.inference_mode()
def test_a_row_does_not_depend_on_how_long_a_prompt_is_divided(ops: NativeOps, dtype: torch.dtype, group: int) -> None:
    """Many threads get smaller pieces than few: the bits are the same."""
    torch.manual_seed(5)
    step, threads = Step([500, 290], [500, 400], dtype=dtype, group=group), torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 8):
            torch.set_num_threads(num_threads)
            results.append(step.attend(ops))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)
    step.assert_right(results[0])


@torch.inference_mode()
def test_tables_that_lead_out_of_the_cache_are_refused(ops: NativeOps) -> None:
    """A wrong number is an error that names the sequence, never a read of foreign memory."""
    torch.manual_seed(4)
    step = Step([1, 2], [20, 30])
    step.tables[1, 1] = 99
    with pytest.raises(RuntimeError, match="block 99 of sequence 1 is not in the cache"):
        step.attend(ops)
    step.tables[1, 1] = 0
    with pytest.raises(RuntimeError, match="does not share the blocks"):
        step.attend(ops, [(0, 2, 1)])
    slots = torch.tensor([step.cache.shape[0] * 16])
    angles = torch.zeros(1, 32)
    with pytest.raises(RuntimeError, match="is not in the cache"):
        ops.rotary_write_kv(torch.zeros(1, 10 * 64), None, angles, angles, slots, step.cache[:, 1], 6)


def turned(heads: Tensor, norm: Tensor | None, angles: Tensor) -> Tensor:
    if norm is not None:
        heads = heads / torch.sqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.float()
    first, second = heads.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


@both_dtypes
@pytest.mark.parametrize("in_dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3, 65])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize("with_norms", [False, True])
@torch.inference_mode()
def test_rotation_and_cache_write_equal_their_twins(
    ops: NativeOps, dtype: torch.dtype, in_dtype: torch.dtype, num_rows: int, head_dim: int, with_norms: bool
) -> None:
    """The query comes back rotated, keys and values lie at their slots, and no other memory is touched."""
    torch.manual_seed(5)
    num_heads, num_kv_heads, block_size, num_blocks = 6, 2, 4, 20
    qkv = torch.randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim).to(in_dtype)
    scales, angles = torch.rand(num_rows) + 0.5, torch.randn(num_rows, head_dim // 2)
    slots = torch.randperm(num_blocks * block_size)[:num_rows]
    norms = [torch.randn(head_dim).to(dtype) if with_norms else None for _ in range(2)]
    cache = torch.full((num_blocks, 2, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    query = ops.rotary_write_kv(
        qkv, scales, angles.cos(), angles.sin(), slots, cache[:, 1], num_heads, norms[0], norms[1], 1e-5
    )
    heads = (qkv.float() * scales[:, None]).view(num_rows, -1, head_dim)
    twins = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    q, k = (turned(x, norm, angles[:, None]) for x, norm in zip(twins, norms, strict=False))
    written = cache[slots // block_size, 1, :, :, slots % block_size]  # [T, 2, K, D]
    for ours, twin in ((query, q), (written[:, 0], k), (written[:, 1], twins[2])):
        assert ours.dtype == dtype
        assert (ours.float() - twin).abs().max() <= TOLERANCES["rotary_write_kv", dtype] * max(
            1.0, float(twin.abs().max()) / 2
        )
    untouched = cache.isnan().sum() + 2 * num_kv_heads * num_rows * head_dim
    assert untouched == cache.numel()
