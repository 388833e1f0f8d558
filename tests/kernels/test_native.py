"""Every native operation gives what plain torch gives in float32, on odd sizes, in all variants: the others than the
fastest run in `test_native_library.py`."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.api import TOLERANCES
from kernels.cpu.native import NativeOps

DTYPES = [torch.float32, torch.bfloat16]
both_dtypes = pytest.mark.parametrize("dtype", DTYPES)
row_counts = pytest.mark.parametrize("num_rows", [1, 2, 3, 65])
widths = pytest.mark.parametrize("width", [33, 576])


def assert_near(ours: Tensor, twin: Tensor, op: str) -> None:
    """Within the op's tolerance, which grows with the size of the values."""
    difference = (ours.float() - twin.float()).abs()
    assert not difference.isnan().any()
    assert difference.max() <= TOLERANCES[op, ours.dtype] * max(1.0, float(twin.float().abs().max()) / 4)


def assert_quantised(ours: tuple[Tensor, Tensor], twin: Tensor) -> None:
    """Scales are the largest magnitude / 127; a value is off by half a step at most, and float rounding."""
    rows, scales = ours
    assert rows.dtype == torch.uint8
    torch.testing.assert_close(scales, twin.abs().amax(1) / 127, rtol=1e-5, atol=1e-30)
    assert ((rows.float() - 128) * scales[:, None] - twin).abs().max() <= 0.502 * scales.max()
    assert rows.min() >= 1


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()


@both_dtypes
@row_counts
@widths
@torch.inference_mode()
def test_the_norm_adds_its_scaled_delta_in_place(ops: NativeOps, dtype: torch.dtype, num_rows: int, width: int) -> None:
    """With and without delta and scales, as floats and as quantised rows."""
    torch.manual_seed(0)
    residual, delta, weight = torch.randn(num_rows, width), torch.randn(num_rows, width).to(dtype), torch.randn(width)
    scales = torch.rand(num_rows) + 0.5
    for given_delta, given_scales in ((None, None), (delta, None), (delta, scales)):
        added = torch.zeros(()) if given_delta is None else given_delta.float()
        total = residual + added * (1 if given_scales is None else scales[:, None])
        twin = normed(total, weight.to(dtype))
        ours, other = residual.clone(), residual.clone()
        result = ops.add_rms_norm(ours, given_delta, given_scales, weight.to(dtype), 1e-5)
        assert result.dtype == dtype
        assert_near(result, twin, "add_rms_norm")
        torch.testing.assert_close(ours, total, rtol=1e-6, atol=1e-6)
        assert_quantised(ops.add_rms_norm_int8(other, given_delta, given_scales, weight.to(dtype), 1e-5), twin)
        assert torch.equal(ours, other)


def sylvester(block: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / block**0.5


@both_dtypes
@row_counts
@torch.inference_mode()
def test_the_gate_equals_its_twin(ops: NativeOps, dtype: torch.dtype, num_rows: int) -> None:
    """Into both dtypes, with and without scales, very large and very small gates among them."""
    torch.manual_seed(1)
    gate_up, scales = torch.randn(num_rows, 2 * 37).to(dtype), torch.rand(num_rows) + 0.5
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -90.0, 0.0])
    for given in (None, scales):
        gate, up = (gate_up.float() * (1 if given is None else scales[:, None])).chunk(2, -1)
        for out in DTYPES:
            assert_near(ops.silu_mul(gate_up, given, out), F.silu(gate) * up, "silu_mul")


@both_dtypes
@row_counts
@pytest.mark.parametrize("width", [64, 192])
@torch.inference_mode()
def test_blocks_are_rotated_before_they_are_rounded(
    ops: NativeOps, dtype: torch.dtype, num_rows: int, width: int
) -> None:
    """Sylvester's matrix over the root of its size, for every block of 64; a row of NaN stays alone."""
    torch.manual_seed(2)
    x = torch.randn(num_rows, width).to(dtype)
    twin = (x.float().view(num_rows, -1, 64) @ sylvester(64)).view(num_rows, width)
    assert_quantised(ops.quantise_rows(x, 64), twin)
    poisoned = torch.cat([x, torch.full((1, width), float("nan")).to(dtype)])
    codes, scales = ops.quantise_rows(poisoned, 64)
    assert_quantised((codes[:-1], scales[:-1]), twin)
    assert scales[-1].isnan()


def test_a_block_that_does_not_divide_the_row_is_refused(ops: NativeOps) -> None:
    """The message names both sizes; no block but that of 64 is taken."""
    for hadamard, width in ((64, 96), (8, 64), (-1, 64)):
        with pytest.raises(RuntimeError, match=f"not {hadamard} for rows of {width}"):
            ops.quantise_rows(torch.zeros(1, width), hadamard)


@both_dtypes
@row_counts
@widths
@torch.inference_mode()
def test_rows_are_quantised_each_by_itself(ops: NativeOps, dtype: torch.dtype, num_rows: int, width: int) -> None:
    """Zeros stay exact, halves go to the even neighbour, and a row with NaN poisons its own scale only."""
    torch.manual_seed(3)
    x = torch.randn(num_rows, width).to(dtype)
    x[0] = 0
    assert_quantised(ops.quantise_rows(x), x.float())
    assert (ops.quantise_rows(x)[0][0] == 128).all()
    halves = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0]]).to(dtype)
    assert ops.quantise_rows(halves)[0].tolist() == [[255, 128, 130, 130, 128, 126, 1]]
    poisoned = x.clone()
    poisoned[-1, -1] = float("nan")
    rows, scales = ops.quantise_rows(poisoned)
    assert scales.isnan().tolist() == [False] * (num_rows - 1) + [True]
    assert torch.equal(rows[:-1], ops.quantise_rows(x)[0][:-1])


@both_dtypes
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("width", "num_outputs"), [(33, 5), (576, 67), (1536, 16)])
@torch.inference_mode()
def test_matvec_equals_the_product(
    ops: NativeOps, dtype: torch.dtype, x_dtype: torch.dtype, num_rows: int, width: int, num_outputs: int
) -> None:
    """Summed in float32, for every pair of dtypes; more than four rows are refused."""
    torch.manual_seed(4)
    x, weight = torch.randn(num_rows, width).to(x_dtype), torch.randn(num_outputs, width).to(dtype)
    twin = x.double() @ weight.double().T
    torch.testing.assert_close(ops.matvec(x, weight).double(), twin, rtol=1e-5, atol=2e-4)
    with pytest.raises(RuntimeError, match="at most 4 rows"):
        ops.matvec(torch.ones(5, width), weight)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("width", "num_outputs"), [(33, 5), (576, 67)])
@torch.inference_mode()
def test_int8_matvec_is_exact(ops: NativeOps, num_rows: int, width: int, num_outputs: int) -> None:
    """Bytes of all sizes, 255 times 127 among them, equal the product of integers times the scales."""
    torch.manual_seed(5)
    x = torch.randint(0, 256, (num_rows, width), dtype=torch.uint8)
    weight = torch.randint(-128, 128, (num_outputs, width), dtype=torch.int8)
    x[0], weight[0] = 255, 127
    exact = (x.long() - 128) @ weight.long().T
    assert torch.equal(ops.matvec(x, weight), exact.float())
    scales, row_scales = torch.rand(num_outputs), torch.rand(num_rows)
    twin = exact * scales.double() * row_scales.double()[:, None]
    torch.testing.assert_close(ops.matvec(x, weight, scales, row_scales).double(), twin, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("num_rows", "width", "num_outputs"), [(1, 64, 37), (3, 33, 50), (65, 576, 197), (130, 48, 33)]
)
@torch.inference_mode()
def test_wide_products_are_those_of_float32(ops: NativeOps, num_rows: int, width: int, num_outputs: int) -> None:
    """For sizes that fill no tile, and for more rows than one block holds."""
    torch.manual_seed(8)
    x, weight = torch.randn(num_rows, width).bfloat16(), torch.randn(num_outputs, width).bfloat16()
    torch.testing.assert_close(ops.wide_linear(x, weight), x.float() @ weight.float().T, rtol=1e-5, atol=1e-3)
    with pytest.raises(RuntimeError, match="bfloat16"):
        ops.wide_linear(x.float(), weight)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 7, 16, 17, 21, 27, 33, 65, 513])
@pytest.mark.parametrize(("width", "num_outputs"), [(33, 5), (64, 16), (576, 67), (130, 1000)])
@torch.inference_mode()
def test_products_of_tiles_equal_those_of_float32(
    tile_ops: NativeOps, num_rows: int, width: int, num_outputs: int
) -> None:
    """For rows, widths and outputs that fill no tile, with and without bias; int8 sums are exact, 255 x 127 too; a row
    of NaN stays alone."""
    torch.manual_seed(9)
    x, weight, bias = torch.randn(num_rows, width), torch.randn(num_outputs, width), torch.randn(num_outputs)
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    twin, packed = x.float() @ weight.float().T, tile_ops.tile_pack(weight)
    assert_near(tile_ops.tile_linear(x, packed, None, num_outputs), twin, "linear")
    assert_near(tile_ops.tile_linear(x, packed, bias, num_outputs), twin + bias.float(), "linear")
    wide = tile_ops.tile_linear(x, packed, bias, num_outputs, torch.float32)
    torch.testing.assert_close(wide, twin + bias.float(), rtol=1e-5, atol=1e-4)
    poisoned = torch.cat([x, torch.full((1, width), float("nan")).bfloat16()])
    assert_near(tile_ops.tile_linear(poisoned, packed, None, num_outputs)[:-1], twin, "linear")
    rows = torch.randint(0, 256, (num_rows, width), dtype=torch.uint8)
    codes, scales = torch.randint(-127, 128, (num_outputs, width), dtype=torch.int8), torch.rand(num_outputs)
    rows[0], codes[0] = 255, 127
    exact = (rows.double() - 128) @ codes.double().T
    zeros = 128 * codes.sum(1, dtype=torch.int32)
    ours = tile_ops.tile_linear_int8(rows, tile_ops.tile_pack(codes), torch.ones(num_outputs), zeros)
    assert torch.equal(ours.double(), exact)
    ours = tile_ops.tile_linear_int8(rows, tile_ops.tile_pack(codes), scales, zeros)
    torch.testing.assert_close(ours, exact.float() * scales)
    rounded = tile_ops.tile_linear_int8(rows, tile_ops.tile_pack(codes), scales, zeros, torch.bfloat16)
    assert torch.equal(rounded, ours.bfloat16())
    room = torch.full((num_rows + 2, num_outputs), 7.0)
    tile_ops.tile_linear_int8(rows, tile_ops.tile_pack(codes), scales, zeros, out=room[1:-1])
    assert torch.equal(room[1:-1], ours) and (room[[0, -1]] == 7).all()
    tile_ops.tile_linear(x, packed, bias, num_outputs, out=room[1:-1])
    assert torch.equal(room[1:-1], wide) and (room[[0, -1]] == 7).all()
    for bad in (
        room,
        torch.empty(num_rows, num_outputs + 32),
        room[1:-1].double(),
        torch.ones(num_outputs, num_rows + 1).T[:-1],
    ):
        with pytest.raises(RuntimeError, match=r"out must|no weight of"):
            torch.ops.v4flash.tile_linear(x, packed, None, bad)


@row_counts
@pytest.mark.parametrize(("width", "num_outputs"), [(32, 1), (33, 31), (64, 40), (576, 1000)])
@torch.inference_mode()
def test_the_best_output_is_that_of_all_outputs(ops: NativeOps, num_rows: int, width: int, num_outputs: int) -> None:
    """The first of equal ones, also where all are below the zeros that pad a weight; rows with NaN or infinity are
    named, whichever output has it, and harm no other."""
    torch.manual_seed(13)
    x, weight = torch.randn(num_rows, width).bfloat16(), torch.randn(num_outputs, width).bfloat16()
    weight[num_outputs // 2 :] = weight[: (num_outputs + 1) // 2].clone()  # each row has its best one twice
    x[0], weight[:, 0] = 0, -weight[:, 0].abs()
    x[0, 0] = 1  # all outputs of the first row are negative
    linears = [(lambda x: ops.wide_linear(x, weight), lambda x: ops.wide_best(x, weight))]
    if ops.has_tiles:
        packed = ops.tile_pack(weight)
        linear = partial(ops.tile_linear, packed=packed, bias=None, num_outputs=num_outputs, dtype=torch.float32)
        linears.append((linear, lambda x: ops.tile_best(x, packed, num_outputs)))
    for linear, best in linears:
        ids, are_finite = best(x)
        outputs = linear(x)
        first = (outputs == outputs.amax(1, keepdim=True)).int().argmax(1)
        assert torch.equal(ids, first) and are_finite.all()
        for bad in (float("nan"), float("inf"), -float("inf")):
            poisoned = torch.cat([x, torch.full((1, width), bad).bfloat16(), x])
            ids, are_finite = best(poisoned)
            assert torch.equal(are_finite, linear(poisoned).isfinite().all(1))
            assert torch.equal(ids[:num_rows], first) and torch.equal(ids[num_rows + 1 :], first)
            assert are_finite.tolist() == [True] * num_rows + [False] + [True] * num_rows


@torch.inference_mode()
def test_one_output_that_is_not_finite_is_seen_wherever_it_is(ops: NativeOps) -> None:
    """In the last output too, which shares its lanes with padding."""
    x, weight = torch.ones(40, 64).bfloat16(), torch.ones(37, 64).bfloat16()
    for output in (0, 16, 36):
        other = weight.clone()
        other[output, 5] = float("inf")
        found = [ops.wide_best(x, other)]
        if ops.has_tiles:
            found.append(ops.tile_best(x, ops.tile_pack(other), 37))
        for _, are_finite in found:
            assert not are_finite.any()


@pytest.mark.parametrize("num_rows", [1, 31, 33, 513])
@pytest.mark.parametrize(("width", "num_gates"), [(33, 64), (576, 192)])
@torch.inference_mode()
def test_a_gate_beside_its_products_equals_the_gate_after_them(
    tile_ops: NativeOps, num_rows: int, width: int, num_gates: int
) -> None:
    """To the bit in int8, rotated or not, to one rounding in bfloat16; a row of NaN stays alone, gates so low and so
    high that their exponential has no inverse are right."""
    torch.manual_seed(11)
    x, weight = torch.randn(num_rows, width).bfloat16(), torch.randn(2 * num_gates, width).bfloat16()
    weight[0], weight[1], x[0] = 50, -50, 1  # silu of thousands and of minus thousands
    gate, up = (x.float() @ weight.float().T).chunk(2, -1)
    twin = F.silu(gate) * up
    packed = tile_ops.tile_pack(weight)
    scale = twin.abs().clamp_min(1)
    assert_near((tile_ops.tile_gate(x, packed) / scale).bfloat16(), twin / scale, "silu_mul")
    poisoned = torch.cat([x, torch.full((1, width), float("nan")).bfloat16()])
    ours = tile_ops.tile_gate(poisoned, packed)
    assert_near((ours[:-1] / scale).bfloat16(), twin / scale, "silu_mul")
    assert ours[-1].isnan().all()
    rows = torch.randint(0, 256, (num_rows, width), dtype=torch.uint8)
    codes = torch.randint(-127, 128, (2 * num_gates, width), dtype=torch.int8)
    scales, row_scales = torch.rand(2 * num_gates) / width, torch.rand(num_rows)
    zeros, packed = 128 * codes.sum(1, dtype=torch.int32), tile_ops.tile_pack(codes)
    for hadamard in (0, 64):
        gated = tile_ops.silu_mul(tile_ops.tile_linear_int8(rows, packed, scales, zeros), row_scales, torch.bfloat16)
        after = tile_ops.quantise_rows(gated, hadamard)
        ours_int8 = tile_ops.tile_gate_int8(rows, row_scales, packed, scales, zeros, hadamard)
        assert all(torch.equal(one, other) for one, other in zip(ours_int8, after, strict=True))
        row_scales[-1] = float("nan")
        poisoned_int8 = tile_ops.tile_gate_int8(rows, row_scales, packed, scales, zeros, hadamard)
        assert all(torch.equal(one[:-1], other[:-1]) for one, other in zip(poisoned_int8, after, strict=True))
        assert poisoned_int8[1][-1].isnan()
        row_scales[-1] = 1.0


@torch.inference_mode()
def test_gates_that_do_not_fit_are_refused(tile_ops: NativeOps) -> None:
    """By width and by dtype, and a Hadamard of another size."""
    x, scales = torch.ones(3, 64).bfloat16(), torch.ones(3)
    with pytest.raises(RuntimeError, match="multiples of 64 wide, not 32"):
        tile_ops.tile_gate(x, tile_ops.tile_pack(torch.ones(64, 64).bfloat16()))
    with pytest.raises(RuntimeError, match="no weight of"):
        tile_ops.tile_gate(torch.ones(3, 65).bfloat16(), tile_ops.tile_pack(torch.ones(128, 64).bfloat16()))
    packed, ones = tile_ops.tile_pack(torch.ones(128, 64, dtype=torch.int8)), torch.ones(128)
    with pytest.raises(RuntimeError, match="hadamard must be 0, or 64"):
        tile_ops.tile_gate_int8(x.to(torch.uint8), scales, packed, ones, ones.int(), 32)
    with pytest.raises(RuntimeError, match="x_scales must be 3"):
        tile_ops.tile_gate_int8(x.to(torch.uint8), ones, packed, ones, ones.int(), 64)


@torch.inference_mode()
def test_a_packed_weight_of_another_size_is_refused(ops: NativeOps) -> None:
    """By number of outputs, width and dtype: reading past its end is impossible."""
    packed, x = ops.tile_pack(torch.ones(40, 64).bfloat16()), torch.ones(3, 64).bfloat16()
    for rows, outputs in ((x, 65), (x, 32), (torch.ones(3, 65).bfloat16(), 40), (torch.ones(3, 32).bfloat16(), 40)):
        with pytest.raises(RuntimeError, match="no weight of"):
            ops.tile_linear(rows, packed, None, outputs)
    for other in (torch.ones(2, 2, 1, 1).bfloat16(), packed[:, :, :1].contiguous(), packed[..., :256].contiguous()):
        with pytest.raises(RuntimeError, match="no weight of"):
            ops.tile_linear(x, other, None, 40)
    with pytest.raises(RuntimeError, match="no weight of"):
        ops.tile_linear(x[:, :0], torch.ones(2, 0, 2, 512).bfloat16(), None, 40)
    with pytest.raises(RuntimeError, match="x and packed must be"):
        ops.tile_linear(x.float(), packed, None, 40)
    with pytest.raises(RuntimeError, match="int8 or bfloat16"):
        ops.tile_pack(torch.ones(3, 3))
    if not ops.has_tiles:
        with pytest.raises(RuntimeError, match="tile"):
            ops.tile_linear(x, packed, None, 40)


def test_the_library_is_registered_as_torch_wants(ops: NativeOps) -> None:
    """Schemas say what is mutated, and the shapes for tracing are right."""
    v4flash, x, gate_up = torch.ops.v4flash, torch.randn(3, 32), torch.randn(3, 64)
    norm = (x.clone(), x, torch.ones(3), torch.ones(32), 1e-5)
    rotary = (torch.randn(3, 32), None, *torch.randn(2, 3, 4), torch.arange(3), torch.zeros(2, 2, 1, 4, 8), 2)
    int32 = {"dtype": torch.int32}
    tables = (torch.tensor([0, 3], **int32), torch.tensor([5], **int32), torch.tensor([[1, 0]], **int32))
    none_shared = torch.empty(0, 3, **int32)
    stored = torch.zeros(2, 2, 1, 4, 8, dtype=torch.int8), torch.ones(2, 2, 1, 4, 1).half()
    attention = (torch.randn(3, 2, 8), torch.randn(2, 2, 1, 4, 8), *tables, none_shared)
    for op, args in (
        (v4flash.add_rms_norm, norm),
        (v4flash.add_rms_norm_int8, norm),
        (v4flash.silu_mul, (gate_up, None, torch.bfloat16)),
        (v4flash.quantise_rows, (x,)),
        (v4flash.quantise_rows, (torch.randn(3, 128), 64)),
        (v4flash.rotary_write_kv, (*rotary, None, None, 0.0)),
        (v4flash.attention, attention),
        (v4flash.attention, (attention[0], stored[0], *attention[2:], torch.randn(5, 2, 1, 8), stored[1], 64)),
        (v4flash.matvec, (x, torch.randn(7, 32), None, None)),
        (v4flash.wide_linear, (x.bfloat16(), torch.randn(7, 32).bfloat16())),
        (v4flash.wide_best, (x.bfloat16(), torch.randn(7, 32).bfloat16())),
    ):
        torch.library.opcheck(op.default, args)
    slots, tail = torch.tensor([0], **int32), torch.zeros(1, 2, 1, 3, 8)
    write = (*rotary[:4], *tables, slots, *stored, tail, 64, 2, None, None, 0.0)
    checks = ("test_schema", "test_faketensor")  # how many rows come back is known only once lengths are
    torch.library.opcheck(v4flash.stored_rotary_write.default, write, test_utils=checks)
    dense, codes = torch.randn(7, 33).bfloat16(), torch.ones(7, 65, dtype=torch.int8)
    torch.library.opcheck(v4flash.tile_pack.default, (dense,))
    torch.library.opcheck(v4flash.tile_pack.default, (codes,))
    if ops.has_tiles:
        rows, zeros = torch.ones(3, 65, dtype=torch.uint8), torch.zeros(7, **int32)
        room = torch.empty(3, 7)
        torch.library.opcheck(v4flash.tile_linear.default, (dense[:3], ops.tile_pack(dense), None, room))
        torch.library.opcheck(v4flash.tile_best.default, (dense[:3], ops.tile_pack(dense), 7))
        packed = ops.tile_pack(codes), torch.ones(7), zeros
        torch.library.opcheck(v4flash.tile_linear_int8.default, (rows, *packed, room.bfloat16()))
        both, ones = ops.tile_pack(torch.ones(128, 65, dtype=torch.int8)), torch.ones(128)
        torch.library.opcheck(v4flash.tile_gate.default, (dense[:3], ops.tile_pack(torch.ones(128, 33).bfloat16())))
        torch.library.opcheck(v4flash.tile_gate_int8.default, (rows, torch.ones(3), both, ones, ones.int(), 64))
