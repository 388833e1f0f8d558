"""Readable twins of int8: rows rounded one by one, weights by output channel, a Hadamard that spreads outliers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rows import ZERO_POINT, Product, QuantRows, RowFormat, Rows, ScaledRows

LEVELS = 127  # symmetric: -127..127, so that a negated row is the negated code
SMALLEST_SCALE = 1e-12  # a row of zeros divides by this instead of zero


def hadamard_matrix(size: int) -> Tensor:
    """The symmetric orthonormal Hadamard matrix [size, size] of Sylvester's order; `size` is a power of two."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard matrix of Sylvester's kind has a power of two of rows, not {size}")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / math.sqrt(size)


def hadamard_blocks(x: Tensor, block: int) -> Tensor:
    """x [..., X] with every `block` columns multiplied by the Hadamard matrix. Raises ValueError if they do not fit."""
    if x.shape[-1] % block:
        raise ValueError(f"{x.shape[-1]} columns are not a multiple of the Hadamard block {block}")
    parts = x.reshape(*x.shape[:-1], -1, block)
    return torch.matmul(parts, hadamard_matrix(block).to(x.dtype)).flatten(-2)


def quantise_rows(x: Tensor, hadamard: int = 0) -> QuantRows:
    """[T, X] -> uint8 rows with one scale each: the largest entry becomes 127, half to even."""
    x = hadamard_blocks(x.float(), hadamard) if hadamard else x.float()
    scales = (x.abs().amax(-1) / LEVELS).clamp(min=SMALLEST_SCALE)
    codes = (x / scales[:, None]).round().clamp(-LEVELS, LEVELS)
    return QuantRows((codes + ZERO_POINT).to(torch.uint8), scales)


def quantise_weight(weight: Tensor, hadamard: int = 0) -> tuple[Tensor, Tensor]:
    """[out, in] -> int8 [out, in] and one float32 scale per output channel."""
    rows = quantise_rows(weight, hadamard)
    return (rows.values.to(torch.int16) - ZERO_POINT).to(torch.int8), rows.scales


def to_rows(x: Tensor, row_format: RowFormat) -> Rows:
    """float32 rows in the form that a linear takes."""
    return quantise_rows(x, row_format.hadamard) if row_format.is_int8 else x.to(row_format.dtype)


@dataclass(frozen=True, slots=True)
class ReferenceInt8Linear:
    """(x - 128) W^T in exact integers, then the scales: of the channel at once, of the row by the next operation."""

    codes: Tensor  # [out, in] int8
    scales: Tensor  # [out] float32
    bias: Tensor | None
    row_format: RowFormat

    def __call__(self, rows: Rows) -> Product:
        if isinstance(rows, Tensor):
            rows = quantise_rows(rows, self.row_format.hadamard)
        exact = (rows.values.double() - ZERO_POINT) @ self.codes.double().T
        product = ScaledRows((exact * self.scales).float(), rows.scales)
        return product if self.bias is None else product.values * product.scales[:, None] + self.bias.float()
