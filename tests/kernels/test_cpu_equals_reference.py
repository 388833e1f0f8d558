"""Every fast operation gives what its readable twin gives, on odd sizes and in memory poisoned by NaN."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from kernels.api import TOLERANCES, AttentionPlan
from kernels.cpu.linear import PlainLinear, can_pack
from kernels.select import KERNELS, select_kernels

REFERENCE = select_kernels("cpu", prefer="reference")
FAST = sorted(set(KERNELS) - {"reference"})
DTYPES = [torch.float32, torch.bfloat16]
NUM_LAYERS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 2, 2, 4, 8

each = pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in FAST for dtype in DTYPES])


def assert_near(ours: Tensor, twin: Tensor, op: str, dtype: torch.dtype) -> None:
    assert ours.dtype == twin.dtype
    assert ours.shape == twin.shape
    difference = (ours.float() - twin.float()).abs()
    assert not difference.isnan().any()
    assert difference.max() <= TOLERANCES[op, dtype] * max(1.0, float(twin.float().abs().max()) / 4)


@each
@pytest.mark.parametrize("num_rows", [1, 3, 65])
@torch.inference_mode()
def test_linear_equals_its_twin(name: str, dtype: torch.dtype, num_rows: int) -> None:
    """With and without bias, for sizes that fill no tile."""
    torch.manual_seed(0)
    weight, bias, x = torch.randn(37, 51).to(dtype), torch.randn(37).to(dtype), torch.randn(num_rows, 51).to(dtype)
    for b in (None, bias):
        ours = select_kernels("cpu", prefer=name).pack_linear(weight, b)(x)
        assert_near(ours, REFERENCE.pack_linear(weight, b)(x), "linear", dtype)


@each
@torch.inference_mode()
def test_pointwise_operations_equal_their_twins(name: str, dtype: torch.dtype) -> None:
    """Norm with the residual's update, rotation and gate, on strided input as the model gives it."""
    torch.manual_seed(1)
    kernels = select_kernels("cpu", prefer=name)
    residual, delta, weight = torch.randn(5, 33), torch.randn(5, 33).to(dtype), torch.randn(33).to(dtype)
    other = residual.clone()
    ours, twin = (k.add_rms_norm(r, delta, weight, 1e-5) for k, r in ((kernels, residual), (REFERENCE, other)))
    assert_near(ours, twin, "rms_norm", dtype)
    assert torch.equal(residual, other)
    heads = torch.randn(5, 7, HEAD_DIM).to(dtype)[:, 2:5]
    angles = torch.randn(5, HEAD_DIM // 2)
    args = heads, angles.cos(), angles.sin()
    assert_near(kernels.rotary(*args), REFERENCE.rotary(*args), "rotary", dtype)
    gate_up = torch.randn(5, 22).to(dtype)
    assert_near(kernels.silu_mul(gate_up), REFERENCE.silu_mul(gate_up), "silu_mul", dtype)


def plan_of(query_lens: list[int], kv_lens: list[int], tables: list[list[int]]) -> AttentionPlan:
    width = max(map(len, tables))
    slots = [
        table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for query_len, kv_len, table in zip(query_lens, kv_lens, tables, strict=True)
        for position in range(kv_len - query_len, kv_len)
    ]
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables])
    return AttentionPlan([0, *accumulate(query_lens)], kv_lens, padded, torch.tensor(slots), BLOCK_SIZE)


PREFIX = [3, 1, 4, 9, 2]
PLANS = {
    "decode rows of very different lengths": ([1] * 4, [1, 4, 5, 39], [[11], [12], [13, 14], list(range(20, 30))]),
    "decode rows behind a shared prefix": (
        [1] * 5,
        [21, 22, 24, 25, 27],
        [[*PREFIX, 10 + s, 20 + s] for s in range(5)],
    ),
    "chunks behind a shared prefix": ([3] * 4, [23, 24, 25, 26], [[*PREFIX, 10 + s, 20 + s] for s in range(4)]),
    "a prefill beside a chunk and decode rows": (
        [7, 70, 1, 1],
        [7, 75, 9, 2],
        [[10, 11], list(range(20, 39)), [12, 13, 14], [15]],
    ),
}


@each
@pytest.mark.parametrize("plan", list(PLANS))
@torch.inference_mode()
def test_attention_equals_its_twin(name: str, dtype: torch.dtype, plan: str) -> None:
    """For every shape of a batch, in the last layer, while all that no position owns is NaN."""
    torch.manual_seed(2)
    query_lens, kv_lens, tables = PLANS[plan]
    cache = torch.full((40, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), float("nan"), dtype=dtype)
    for kv_len, table in zip(kv_lens, tables, strict=True):
        for position in range(kv_len):
            cache[table[position // BLOCK_SIZE], 1, :, :, position % BLOCK_SIZE] = torch.randn(HEAD_DIM).to(dtype)
    key, value = torch.randn(2, sum(query_lens), NUM_KV_HEADS, HEAD_DIM).to(dtype)
    query = torch.randn(sum(query_lens), 3 * NUM_KV_HEADS, HEAD_DIM).to(dtype)
    results, caches = [], []
    for kernels in (select_kernels("cpu", prefer=name), REFERENCE):
        own, step = cache.clone(), plan_of(query_lens, kv_lens, tables)
        kernels.write_kv(key, value, own, 1, step)
        results.append(kernels.attention(query, own, 1, step))
        caches.append(own)
    assert torch.equal(caches[0].nan_to_num(7.0), caches[1].nan_to_num(7.0))
    assert_near(results[0], results[1], "attention", dtype)


def test_linears_fall_back_where_packing_is_wrong_or_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without working private operations the public one serves."""
    from kernels.cpu import linear

    def absent(weight: Tensor, bias: Tensor | None) -> linear.PackedLinear:
        raise RuntimeError("no such operation")

    can_pack.cache_clear()
    monkeypatch.setattr(linear, "_pack", absent)
    try:
        assert isinstance(linear.make_linear(torch.eye(3), None), PlainLinear)
    finally:
        can_pack.cache_clear()


def test_an_unknown_device_is_refused_with_the_choices() -> None:
    """The message names what can be chosen."""
    with pytest.raises(ValueError, match="reference"):
        select_kernels("abacus")
