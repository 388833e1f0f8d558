"""Every fast operation gives what its readable twin gives, on odd sizes and in memory poisoned by NaN."""

import os
import subprocess
import sys
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from kernels.api import TOLERANCES, AttentionPlan, HeadNorms
from kernels.cpu.int8 import can_multiply_int8
from kernels.cpu.linear import PlainLinear, can_pack
from kernels.cpu.native import load_native, supported_isas
from kernels.cpu.tiles import TileInt8Linear
from kernels.kv import LayerKV
from kernels.reference.quant import hadamard_blocks, hadamard_matrix, quantise_rows
from kernels.rows import QuantRows, RowFormat, ScaledRows, dense
from kernels.select import KERNELS, select_kernels

REFERENCE = select_kernels("cpu", prefer="reference")
FAST = sorted(set(KERNELS) - {"reference"} - ({"cpu-native"} if isinstance(load_native(), str) else set()))
DTYPES = [torch.float32, torch.bfloat16]
FORMATS = {torch.float32: RowFormat.FP32, torch.bfloat16: RowFormat.BF16}
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
        ours, twin = (
            k.pack_linear(weight, b, FORMATS[dtype])(x) for k in (select_kernels("cpu", prefer=name), REFERENCE)
        )
        assert_near(dense(ours), dense(twin), "linear", dtype)


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_logits_are_not_rounded_to_bfloat16_where_operations_are_compiled(tied: bool) -> None:
    """Wide products are those of float32 over the same bfloat16 rows and weight, packed or as it lies."""
    torch.manual_seed(6)
    weight, x = torch.randn(131, 48).bfloat16(), torch.randn(5, 48).bfloat16()
    ours, twin = (
        dense(k.pack_linear(weight, None, RowFormat.BF16, wide=True, tied=tied)(x))
        for k in (select_kernels("cpu", prefer="cpu-native"), REFERENCE)
    )
    assert_near(ours, twin, "linear", torch.float32)
    if can_multiply_int8():
        linear, twin_linear = (
            k.pack_linear(weight.float(), None, RowFormat.INT8, wide=True)
            for k in (select_kernels("cpu", prefer="cpu-native"), REFERENCE)
        )
        rows = quantise_rows(x.float())
        torch.testing.assert_close(dense(linear(rows)), dense(twin_linear(rows)), rtol=1e-5, atol=1e-4)


@each
@torch.inference_mode()
def test_pointwise_operations_equal_their_twins(name: str, dtype: torch.dtype) -> None:
    """Norm with and without the residual's update, and gate, for dense products and for those that wait for their
    row factors."""
    torch.manual_seed(1)
    kernels = select_kernels("cpu", prefer=name)
    weight, scaled = torch.randn(33).to(dtype), ScaledRows(torch.randn(5, 33), torch.rand(5))
    for delta in (None, torch.randn(5, 33).to(dtype), scaled):
        residual = torch.randn(5, 33)
        other = residual.clone()
        ours, twin = (
            k.add_rms_norm(r, delta, weight, 1e-5, FORMATS[dtype]) for k, r in ((kernels, residual), (REFERENCE, other))
        )
        assert_near(ours, twin, "add_rms_norm", dtype)
        assert torch.allclose(residual, other, atol=1e-6)
    for gate_up in (torch.randn(5, 22).to(dtype), ScaledRows(torch.randn(5, 22), torch.rand(5))):
        assert_near(
            kernels.silu_mul(gate_up, FORMATS[dtype]), REFERENCE.silu_mul(gate_up, FORMATS[dtype]), "silu_mul", dtype
        )


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("row_format", [RowFormat.INT8, RowFormat.ROTATED_INT8])
@torch.inference_mode()
def test_int8_rows_equal_their_twins_to_one_level(name: str, row_format: RowFormat) -> None:
    """Norm and gate round to the same codes as their twins, but for entries at the border between two levels."""
    torch.manual_seed(3)
    kernels = select_kernels("cpu", prefer=name)
    residual, weight, scaled = torch.randn(5, 192), torch.randn(192), ScaledRows(torch.randn(5, 384), torch.rand(5))
    pairs = [  # of them the last rounds to bfloat16 before the levels
        [k.add_rms_norm(residual.clone(), None, weight, 1e-5, RowFormat.INT8) for k in (kernels, REFERENCE)],
        [k.silu_mul(scaled, row_format) for k in (kernels, REFERENCE)],
        [k.silu_mul(scaled.values.bfloat16(), row_format) for k in (kernels, REFERENCE)],
    ]
    for most, (ours, twin) in zip((1, 1, 2), pairs, strict=True):
        assert isinstance(ours, QuantRows)
        assert isinstance(twin, QuantRows)
        torch.testing.assert_close(ours.scales, twin.scales, rtol=1e-2, atol=0)
        assert (ours.values.int() - twin.values.int()).abs().max() <= most


@pytest.mark.skipif(not can_multiply_int8(), reason="this CPU has neither VNNI nor AMX: int8 is refused here")
@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 65])
@torch.inference_mode()
def test_int8_linear_equals_its_twin(name: str, num_rows: int) -> None:
    """The sums are exact integers, the largest products (255 x 127) included; only the scales round, and tiles give a
    product in bfloat16."""
    torch.manual_seed(4)
    weight, bias, x = torch.randn(64, 37).T, torch.randn(37), torch.randn(num_rows, 64)  # strided, as after a rotation
    x[0, ::2], x[0, 1::2], weight[0] = 9.0, -9.0, 4.0
    for b in (None, bias):
        for row_format in (RowFormat.INT8, RowFormat.ROTATED_INT8):
            rows = quantise_rows(x, row_format.hadamard)
            linear, twin_linear = (
                k.pack_linear(weight, b, row_format) for k in (select_kernels("cpu", prefer=name), REFERENCE)
            )
            ours, twin = dense(linear(rows)), dense(twin_linear(rows))
            rounding = 2**-8 if isinstance(linear, TileInt8Linear) else 1e-5
            product = twin if b is None else twin - b
            assert ((ours - twin).abs() <= rounding * product.abs() + 1e-4).all()
            exact = x @ weight.T + (0 if b is None else b)
            assert (ours - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_int8_is_refused_where_its_products_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that saturates gets a clear error, never a wrong product."""
    from kernels.cpu import int8

    monkeypatch.setattr(int8, "can_multiply_int8", lambda: False)
    with pytest.raises(ValueError, match="VNNI"):
        int8.make_int8_linear(torch.eye(64).char(), torch.ones(64), None, RowFormat.INT8)


@torch.inference_mode()
def test_a_hadamard_is_orthonormal_and_its_own_inverse() -> None:
    """So the weight's half of a rotation undoes the row's half."""
    matrix = hadamard_matrix(64)
    torch.testing.assert_close(matrix @ matrix, torch.eye(64))
    x = torch.randn(3, 192)
    torch.testing.assert_close(hadamard_blocks(hadamard_blocks(x, 64), 64), x)
    with pytest.raises(ValueError, match="multiple"):
        hadamard_blocks(torch.zeros(2, 65), 64)


def plan_of(query_lens: list[int], kv_lens: list[int], tables: list[list[int]]) -> AttentionPlan:
    width = max(map(len, tables))
    slots = [
        table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for query_len, kv_len, table in zip(query_lens, kv_lens, tables, strict=True)
        for position in range(kv_len - query_len, kv_len)
    ]
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables])
    angles = torch.randn(len(slots), HEAD_DIM // 2, generator=torch.Generator().manual_seed(5))
    starts = [0, *accumulate(query_lens)]
    return AttentionPlan(starts, kv_lens, padded, torch.tensor(slots), BLOCK_SIZE, angles.cos(), angles.sin())


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
@pytest.mark.parametrize("form", ["dense", "normed heads", "row factors"])
@torch.inference_mode()
def test_rotation_and_attention_equal_their_twins(name: str, dtype: torch.dtype, plan: str, form: str) -> None:
    """For every shape of a batch, in the last layer, while all that no position owns is NaN."""
    torch.manual_seed(2)
    query_lens, kv_lens, tables = PLANS[plan]
    cache = torch.full((40, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), float("nan"), dtype=dtype)
    for kv_len, table in zip(kv_lens, tables, strict=True):
        for position in range(kv_len):
            cache[table[position // BLOCK_SIZE], 1, :, :, position % BLOCK_SIZE] = torch.randn(HEAD_DIM).to(dtype)
    qkv = torch.randn(sum(query_lens), 5 * NUM_KV_HEADS * HEAD_DIM)
    norms = HeadNorms(torch.randn(HEAD_DIM).to(dtype), torch.randn(HEAD_DIM).to(dtype), 1e-6)
    products = {
        "dense": (qkv.to(dtype), None),
        "normed heads": (qkv.to(dtype), norms),
        "row factors": (ScaledRows(qkv, torch.rand(len(qkv)) + 0.5), norms),
    }
    product, norms = products[form]
    results, queries, caches = [], [], []
    for kernels in (select_kernels("cpu", prefer=name), REFERENCE):
        own, step = cache.clone(), plan_of(query_lens, kv_lens, tables)
        kv = LayerKV(own[:, 1])
        rows = kernels.rotary_write_kv(product, norms, kv, step)
        queries.append(rows.query)
        results.append(kernels.attention(rows, kv, step))
        caches.append(own)
    assert torch.equal(caches[0].isnan(), caches[1].isnan())
    assert_near(caches[0].nan_to_num(7.0), caches[1].nan_to_num(7.0), "rotary_write_kv", dtype)
    assert_near(queries[0], queries[1], "rotary_write_kv", dtype)
    assert_near(results[0], results[1], "attention", dtype)


def test_linears_fall_back_where_packing_is_wrong_or_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without working private operations the public one serves."""
    from kernels.cpu import linear

    def absent(weight: Tensor) -> Tensor:
        raise RuntimeError("no such operation")

    can_pack.cache_clear()
    monkeypatch.setattr(linear, "_pack", absent)
    try:
        assert isinstance(linear.make_linear(torch.eye(3), None, RowFormat.FP32), PlainLinear)
    finally:
        can_pack.cache_clear()


def test_all_of_this_holds_where_only_avx2_may_be_used() -> None:
    """oneDNN and the compiled operations kept to AVX2, in a child process: bf16 is not packed, int8 is refused where
    its products would saturate, and every other guarantee of this file stands."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA") or "v3" not in supported_isas():
        pytest.skip("no AVX2, or the instruction set is chosen already")
    isa = "v3" if "cpu-native" in FAST else "none"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "V4FLASH_ISA": isa}
    check = (
        "from kernels.cpu.int8 import can_multiply_int8; from kernels.cpu.linear import can_pack;"
        "from kernels.rows import RowFormat; import pytest, sys;"
        "assert not can_multiply_int8(), 'int8'; assert not can_pack(RowFormat.BF16), 'bf16';"
        f"sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', {__file__!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_an_unknown_device_is_refused_with_the_choices() -> None:
    """The message names what can be chosen."""
    with pytest.raises(ValueError, match="reference"):
        select_kernels("abacus")
