"""Decides whether a loaded variant computes right on this machine: small cases against plain torch in float32."""

import math

import torch
from torch import Tensor

from kernels.cpu.native.ops import NativeOps

_DIM, _WIDTH, _BLOCK = 32, 80, 4


def wrong_answers(ops: NativeOps) -> list[str]:
    """Names of the operations whose answer is off."""
    generator = torch.Generator().manual_seed(0)
    cases = {
        "add_rms_norm": _norm,
        "silu_mul": _silu_mul,
        "quantise_rows": _quantise,
        "wide_best": _wide_best,
        "attention": _attention,
        "attention over codes": _stored,
        "matvec": _matvec,
    }
    if ops.has_tiles:
        cases["tile_linear"] = _tile_linear
        cases["tile_gate"] = _tile_gate
    with torch.inference_mode():
        return [name for name, is_right in cases.items() if not is_right(ops, generator)]


def _near(ours: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool(((ours.float() - expected).abs() <= tolerance).all())


def _norm(ops: NativeOps, generator: torch.Generator) -> bool:
    x, weight = torch.randn(3, _WIDTH, generator=generator), torch.randn(_WIDTH, generator=generator)
    expected = torch.nn.functional.rms_norm(x, (_WIDTH,), weight, 1e-5)
    rows, scales = ops.add_rms_norm_int8(x.clone(), None, None, weight, 1e-5)
    dequantised = (rows.float() - 128) * scales[:, None]
    return _near(ops.add_rms_norm(x.clone(), None, None, weight, 1e-5), expected, 1e-4) and _near(
        dequantised, expected, float(scales.max()) * 0.51
    )


def _silu_mul(ops: NativeOps, generator: torch.Generator) -> bool:
    gate, up = torch.randn(2, 3, _WIDTH, generator=generator)
    expected = torch.nn.functional.silu(gate) * up
    return _near(ops.silu_mul(torch.cat([gate, up], 1), None, torch.float32), expected, 1e-4)


def _quantise(ops: NativeOps, generator: torch.Generator) -> bool:
    """Rotated in both dtypes: Sylvester's matrix has -1 where an odd number of bits of row and column meet."""
    signs = torch.tensor([[1.0 - 2.0 * ((i & j).bit_count() % 2) for j in range(64)] for i in range(64)])
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 128, generator=generator).to(dtype)
        expected = (x.float().view(3, 2, 64) @ signs / 8).view(3, 128)
        rows, scales = ops.quantise_rows(x, 64)
        if not _near((rows.float() - 128) * scales[:, None], expected, float(scales.max()) * 0.51):
            return False
    return True


def _wide_best(ops: NativeOps, generator: torch.Generator) -> bool:
    x = torch.randn(19, _WIDTH, generator=generator).bfloat16()
    weight = torch.randn(37, _WIDTH, generator=generator).bfloat16()
    ids, are_finite = ops.wide_best(x, weight)
    return torch.equal(ids, ops.wide_linear(x, weight).argmax(1)) and bool(are_finite.all())


def _attention(ops: NativeOps, generator: torch.Generator) -> bool:
    """A prefill of 9 rows and a decode row, two heads to one key head."""
    blocks = torch.randn(8, 2, 1, _BLOCK, _DIM, generator=generator).bfloat16()
    query = torch.randn(10, 2, _DIM, generator=generator).bfloat16()
    tables = torch.tensor([[5, 2, 7], [0, 3, 1]], dtype=torch.int32)
    starts, lens = torch.tensor([0, 9, 10], dtype=torch.int32), torch.tensor([9, 11], dtype=torch.int32)
    ours = ops.attention(query, blocks, starts, lens, tables, torch.empty(0, 3, dtype=torch.int32))
    for s, (rows, kv_len) in enumerate(((slice(0, 9), 9), (slice(9, 10), 11))):
        key, value = blocks[tables[s].long(), :, 0].float().transpose(0, 1).flatten(1, 2)[:, :kv_len]
        scores = query[rows].float().transpose(0, 1) @ key.T / math.sqrt(_DIM)  # [H, T, kv_len]
        future = torch.ones(scores.shape[1:]).triu(kv_len - scores.shape[1] + 1).bool()
        expected = scores.masked_fill(future, -math.inf).softmax(-1) @ value
        if not _near(ours[rows], expected.transpose(0, 1), 4e-2):
            return False
    return True


def _stored(ops: NativeOps, generator: torch.Generator) -> bool:
    """An int8 cache in two steps: nine rows of one sequence, then one more, which reads two blocks as codes."""
    qkv = torch.randn(10, 4 * _DIM, generator=generator)  # two heads to one key head
    no_turn = torch.ones(10, _DIM // 2), torch.zeros(10, _DIM // 2)
    body, scales = torch.zeros(4, 2, 1, _BLOCK, _DIM, dtype=torch.int8), torch.zeros(4, 2, 1, _BLOCK, 1).half()
    tail, table = torch.zeros(1, 2, 1, _BLOCK - 1, _DIM), torch.tensor([[2, 0, 3]], dtype=torch.int32)
    ours = torch.empty(0)
    for first, last in ((0, 9), (9, 10)):
        rows, cos, sin = (x[first:last].contiguous() for x in (qkv, *no_turn))
        tables = torch.tensor([0, last - first], dtype=torch.int32), torch.tensor([last], dtype=torch.int32), table
        slots = torch.zeros(1, dtype=torch.int32)
        query, exact = ops.stored_rotary_write(rows, None, cos, sin, *tables, slots, body, scales, tail, _DIM, 2)
        none_shared = torch.empty(0, 3, dtype=torch.int32)
        ours = ops.attention(query, body, *tables, none_shared, exact, scales, _DIM)
    key, value = qkv[:, 2 * _DIM : 3 * _DIM].clone(), qkv[:, 3 * _DIM :].clone()
    for part, x in enumerate((key, value)):
        for index, block in enumerate((2, 0)):
            step = scales[block, part, 0].float()
            read, own = body[block, part, 0] * step, x[index * _BLOCK : (index + 1) * _BLOCK]
            if not ((read - own).abs() <= step * 0.5001).all():
                return False
            own.copy_(read)
    scores = qkv[9, : 2 * _DIM].view(2, _DIM) @ key.T / math.sqrt(_DIM)
    return _near(ours[0], scores.softmax(-1) @ value, 1e-4)


def _matvec(ops: NativeOps, generator: torch.Generator) -> bool:
    """The largest u8 times the largest s8 saturates in 16 bits where an instruction is used wrongly."""
    x, weight = torch.randn(2, _WIDTH, generator=generator), torch.randn(5, _WIDTH, generator=generator)
    rows = torch.full((1, _WIDTH), 255, dtype=torch.uint8)
    weights = torch.full((5, _WIDTH), 127, dtype=torch.int8)
    exact = torch.full((1, 5), (255.0 - 128) * 127 * _WIDTH)
    return _near(ops.matvec(x, weight), x @ weight.T, 1e-3) and torch.equal(ops.matvec(rows, weights), exact)


def _tile_linear(ops: NativeOps, generator: torch.Generator) -> bool:
    """Rows and outputs that fill no tile, in both formats, rounded or not; sums of the largest bytes are exact."""
    x = torch.randn(19, _WIDTH + 1, generator=generator).bfloat16()
    weight = torch.randn(37, _WIDTH + 1, generator=generator).bfloat16()
    rows = torch.full((19, _WIDTH + 1), 255, dtype=torch.uint8)
    codes = torch.full((37, _WIDTH + 1), 127, dtype=torch.int8)
    ones, zeros = torch.ones(37), 128 * codes.sum(1, dtype=torch.int32)
    exact = torch.full((19, 37), (255.0 - 128) * 127 * (_WIDTH + 1))
    packed, twin = ops.tile_pack(weight), x.float() @ weight.float().T
    return (
        _near(ops.tile_linear(x, packed, None, 37), twin, 0.25)
        and _near(ops.tile_linear(x, packed, None, 37, torch.float32), twin, 1e-3)
        and torch.equal(ops.tile_best(x, packed, 37)[0], ops.tile_linear(x, packed, None, 37, torch.float32).argmax(1))
        and torch.equal(ops.tile_linear_int8(rows, ops.tile_pack(codes), ones, zeros), exact)
    )


def _tile_gate(ops: NativeOps, generator: torch.Generator) -> bool:
    """As the gate of the product, in both formats; in int8 to the bit."""
    x = torch.randn(19, _WIDTH, generator=generator).bfloat16()
    weight = torch.randn(128, _WIDTH, generator=generator).bfloat16() / _WIDTH
    gate, up = (x.float() @ weight.float().T).chunk(2, -1)
    rows = torch.full((19, _WIDTH), 255, dtype=torch.uint8)
    codes = torch.full((128, _WIDTH), 127, dtype=torch.int8)
    ones, zeros, packed = torch.ones(128), 128 * codes.sum(1, dtype=torch.int32), ops.tile_pack(codes)
    after = ops.silu_mul(ops.tile_linear_int8(rows, packed, ones, zeros), ones[:19], torch.bfloat16)
    beside = ops.tile_gate_int8(rows, ones[:19].clone(), packed, ones, zeros, 64)
    return _near(ops.tile_gate(x, ops.tile_pack(weight)), torch.nn.functional.silu(gate) * up, 1e-2) and all(
        torch.equal(one, other) for one, other in zip(beside, ops.quantise_rows(after, 64), strict=True)
    )
