"""int8 linears through an oneDNN operation that torch keeps private: u8 rows times s8 weights, exact int32 sums.

Without VNNI or AMX that operation adds pairs of products in 16 bits and saturates silently, so a probe with the largest
products decides whether this machine has the mode at all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels.reference.quant import quantise_rows
from kernels.rows import ZERO_POINT, Product, QuantRows, RowFormat, Rows, ScaledRows

_PACKING_ROWS = 64  # as for the dense linears: one packing serves one row and thousands
_EXACT_FLOAT32 = 2**24


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """A weight of one scale per output channel. `quantise` rounds dense rows, where no fused operation has."""

    weight: Tensor  # opaque, [in, out]
    scales: Tensor  # [out] float32
    zero_points: Tensor  # [out] int32, all zero
    bias: Tensor | None
    row_format: RowFormat
    quantise: Callable[[Tensor], QuantRows]

    def __call__(self, rows: Rows) -> Product:
        rows = self.rounded(rows)
        product = ScaledRows(_multiply(rows.values, self.weight, self.scales, self.zero_points), rows.scales)
        if self.bias is None:
            return product
        return torch.addcmul(self.bias, product.values, product.scales[:, None])

    def rounded(self, rows: Rows) -> QuantRows:
        """The rows as they are, or rounded where they are dense."""
        if isinstance(rows, QuantRows):
            return rows
        assert self.row_format is RowFormat.INT8, "rotated rows come from the operation before"
        return self.quantise(rows)


def _multiply(values: Tensor, weight: Tensor, scales: Tensor, zero_points: Tensor) -> Tensor:
    y: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        values, 1.0, ZERO_POINT, weight, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


def _pack(codes: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(codes.contiguous(), [_PACKING_ROWS, codes.shape[1]])
    return packed


@cache
def can_multiply_int8() -> bool:
    """Whether the private operation exists here and is exact, at 255 times 127 above all."""
    codes = torch.full((48, 64), 127, dtype=torch.int8)
    codes[1::2] = -127
    codes[:, ::3] = torch.arange(48, dtype=torch.int8)[:, None]
    values = torch.full((5, 64), 255, dtype=torch.uint8)
    values[1:] = (torch.arange(4 * 64).view(4, 64) * 37 % 256).to(torch.uint8)
    exact = (values.long() - ZERO_POINT) @ codes.long().T
    assert exact.abs().max() < _EXACT_FLOAT32
    try:
        product = _multiply(values, _pack(codes), torch.ones(48), torch.zeros(48, dtype=torch.int32))
    except (AttributeError, RuntimeError):  # a torch without the operation, or one that refuses this CPU or these types
        return False
    return torch.equal(product.long(), exact)


def make_int8_linear(
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    row_format: RowFormat,
    quantise: Callable[[Tensor], QuantRows] = quantise_rows,
) -> Int8Linear:
    """Pack int8 codes [out, in] with one scale per output channel [out]; raises ValueError where the product would be
    wrong."""
    if not can_multiply_int8():
        raise ValueError("int8 needs a CPU with VNNI or AMX: without them its products saturate; use bf16 or fp32")
    zero_points = torch.zeros(len(codes), dtype=torch.int32)
    return Int8Linear(
        _pack(codes), scales, zero_points, bias.float() if bias is not None else None, row_format, quantise
    )
