"""Linears over weights packed into tiles, for the tile unit (AMX) and for vector registers alike: one layout for one
row and thousands.

oneDNN's layout keeps its products apart from the stream of the weight, so that steps of few rows read it at half of
what the memory gives; and its int8 form needs a second layout for single rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.api import BestOutputs
from kernels.cpu.native.ops import NativeOps
from kernels.rows import ZERO_POINT, Product, QuantRows, RowFormat, Rows, ScaledRows, dense

_GATED_OUTPUTS = 128  # `tile_gate` works on 64 gates and their ups at a time


@dataclass(frozen=True, slots=True)
class TileLinear:
    """x W^T + b over bfloat16 rows, summed in float32 and rounded once to `dtype`."""

    weight: Tensor  # packed
    bias: Tensor | None  # [out] bfloat16
    num_outputs: int
    ops: NativeOps
    dtype: torch.dtype
    row_format: RowFormat = RowFormat.BF16

    def __call__(self, rows: Rows, room: Tensor | None = None) -> Tensor:
        assert isinstance(rows, Tensor), "a dense linear takes dense rows"
        return self.ops.tile_linear(rows, self.weight, self.bias, self.num_outputs, self.dtype, room)

    def room(self, num_rows: int) -> Tensor:
        """For the product of so many rows, which calls may fill piece by piece where there is no bias."""
        return self.weight.new_empty((num_rows, self.num_outputs), dtype=self.dtype)

    def best(self, rows: Rows) -> BestOutputs | None:
        """The best of the outputs without keeping them; None where that would not give the same."""
        assert isinstance(rows, Tensor), "a dense linear takes dense rows"
        if self.bias is not None or self.dtype is not torch.float32:
            return None
        return BestOutputs(*self.ops.tile_best(rows, self.weight, self.num_outputs))

    def can_gate(self, row_format: RowFormat) -> bool:
        """Whether `gated` serves: as gate and up of a linear that takes such rows."""
        return row_format is RowFormat.BF16 and self.bias is None and self.num_outputs % _GATED_OUTPUTS == 0

    def gated(self, rows: Rows, row_format: RowFormat) -> Tensor:
        """[T, 2 F] outputs -> [T, F]: silu of the first half times the second, not rounded before."""
        assert isinstance(rows, Tensor) and self.can_gate(row_format)
        return self.ops.tile_gate(rows, self.weight)


@dataclass(frozen=True, slots=True)
class TileInt8Linear:
    """Exact int32 sums of int8 codes and rows, times the scales of the output channels, rounded to `dtype`: to write
    float32 takes longer than the product, so it is for logits. `quantise` rounds dense rows, where no fused operation
    has."""

    weight: Tensor  # packed
    scales: Tensor  # [out] float32
    zeros: Tensor  # [out] int32: what the zero point of the rows adds to each sum
    bias: Tensor | None  # [out] float32
    row_format: RowFormat
    ops: NativeOps
    quantise: Callable[[Tensor], QuantRows]
    dtype: torch.dtype

    def __call__(self, rows: Rows, room: Tensor | None = None) -> Product:
        rows = self._rounded(rows)
        sums = self.ops.tile_linear_int8(rows.values, self.weight, self.scales, self.zeros, self.dtype, room)
        product = ScaledRows(sums, rows.scales)
        if self.bias is None:
            return product
        return dense(product) + self.bias

    def room(self, num_rows: int) -> Tensor:
        """As that of `TileLinear`."""
        return self.weight.new_empty((num_rows, self.scales.shape[0]), dtype=self.dtype)

    def can_gate(self, row_format: RowFormat) -> bool:
        """As that of `TileLinear`."""
        return row_format.is_int8 and self.bias is None and self.scales.shape[0] % _GATED_OUTPUTS == 0

    def gated(self, rows: Rows, row_format: RowFormat) -> QuantRows:
        """[T, 2 F] outputs -> [T, F]: silu of the first half times the second, rotated where wanted and rounded."""
        assert self.can_gate(row_format)
        rows = self._rounded(rows)
        return QuantRows(
            *self.ops.tile_gate_int8(
                rows.values, rows.scales, self.weight, self.scales, self.zeros, row_format.hadamard
            )
        )

    def _rounded(self, rows: Rows) -> QuantRows:
        if isinstance(rows, QuantRows):
            return rows
        assert self.row_format is RowFormat.INT8, "rotated rows come from the operation before"
        return self.quantise(rows)


def make_tile_linear(
    weight: Tensor, bias: Tensor | None, ops: NativeOps, dtype: torch.dtype = torch.bfloat16
) -> TileLinear:
    """Pack a weight [out, in] rounded to bfloat16, with a bias [out]."""
    packed = ops.tile_pack(weight.bfloat16().contiguous())
    return TileLinear(packed, bias.bfloat16() if bias is not None else None, len(weight), ops, dtype)


def make_tile_int8_linear(
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    row_format: RowFormat,
    ops: NativeOps,
    quantise: Callable[[Tensor], QuantRows],
    dtype: torch.dtype = torch.bfloat16,
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
        dtype,
    )
