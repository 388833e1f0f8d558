"""Linears over weights packed for the tile unit (AMX), one layout for one row and thousands.

oneDNN's layout keeps its products apart from the stream of the weight, so that steps of few rows read it at half of
what the memory gives; and its int8 form needs a second layout for single rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.native.ops import NativeOps
from kernels.rows import ZERO_POINT, Product, QuantRows, RowFormat, Rows, ScaledRows


@dataclass(frozen=True, slots=True)
class TileLinear:
    """x W^T + b over bfloat16 rows, summed in float32 and rounded once."""

    weight: Tensor  # packed
    bias: Tensor | None  # [out] bfloat16
    num_outputs: int
    ops: NativeOps
    row_format: RowFormat = RowFormat.BF16

    def __call__(self, rows: Rows) -> Tensor:
        assert isinstance(rows, Tensor), "a dense linear takes dense rows"
        return self.ops.tile_linear(rows, self.weight, self.bias, self.num_outputs)


@dataclass(frozen=True, slots=True)
class TileInt8Linear:
    """Exact int32 sums of int8 codes and rows, times the scales of the output channels. `quantise` rounds dense rows,
    where no fused operation has."""

    weight: Tensor  # packed
    scales: Tensor  # [out] float32
    zeros: Tensor  # [out] int32: what the zero point of the rows adds to each sum
    bias: Tensor | None  # [out] float32
    row_format: RowFormat
    ops: NativeOps
    quantise: Callable[[Tensor], QuantRows]

    def __call__(self, rows: Rows) -> Product:
        if not isinstance(rows, QuantRows):
            assert self.row_format is RowFormat.INT8, "rotated rows come from the operation before"
            rows = self.quantise(rows)
        product = ScaledRows(self.ops.tile_linear_int8(rows.values, self.weight, self.scales, self.zeros), rows.scales)
        if self.bias is None:
            return product
        return torch.addcmul(self.bias, product.values, product.scales[:, None])


def make_tile_linear(weight: Tensor, bias: Tensor | None, ops: NativeOps) -> TileLinear:
    """Pack a weight [out, in] rounded to bfloat16, with a bias [out]."""
    packed = ops.tile_pack(weight.bfloat16().contiguous())
    return TileLinear(packed, bias.bfloat16() if bias is not None else None, len(weight), ops)


def make_tile_int8_linear(
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    row_format: RowFormat,
    ops: NativeOps,
    quantise: Callable[[Tensor], QuantRows],
) -> TileInt8Linear:
    """Pack int8 codes [out, in] with one scale per output channel [out]."""
    zeros = ZERO_POINT * codes.sum(1, dtype=torch.int32)
    return TileInt8Linear(
        ops.tile_pack(codes.contiguous()),
        scales,
        zeros,
        bias.float() if bias is not None else None,
        row_format,
        ops,
        quantise,
    )
