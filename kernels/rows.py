"""The forms in which the rows of a step pass from one operation to the next. Shape letters as in `kernels.api`."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

HADAMARD_BLOCK = 64  # divides the intermediate size of every supported model and every shard of it
ZERO_POINT = 128  # a quantised row is unsigned: what the matrix units of x86 take


class RowFormat(Enum):
    """What a linear takes, hence what the operation before it has to give."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    ROTATED_INT8 = "rotated_int8"  # a Hadamard over blocks of 64 columns comes before rounding, outliers spread

    @property
    def is_int8(self) -> bool:
        return self in (RowFormat.INT8, RowFormat.ROTATED_INT8)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of dense rows, and of a norm's weight before such a linear."""
        return torch.bfloat16 if self is RowFormat.BF16 else torch.float32

    @property
    def hadamard(self) -> int:
        """Columns that are rotated together before rounding; 0 for none."""
        return HADAMARD_BLOCK if self is RowFormat.ROTATED_INT8 else 0


@dataclass(frozen=True, slots=True)
class QuantRows:
    """[T, X] rounded row by row: (values - 128) * scales[:, None]."""

    values: Tensor  # [T, X] uint8
    scales: Tensor  # [T] float32

    def __len__(self) -> int:
        return self.values.shape[0]

    def __getitem__(self, rows: slice) -> "QuantRows":
        return QuantRows(self.values[rows], self.scales[rows])


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """A product [T, X] whose row factors the next operation applies: values * scales[:, None]."""

    values: Tensor  # [T, X] float32 or bfloat16
    scales: Tensor  # [T] float32

    def __getitem__(self, rows: Tensor) -> "ScaledRows":
        return ScaledRows(self.values[rows], self.scales[rows])


Rows = Tensor | QuantRows
Product = Tensor | ScaledRows


def dense(product: Product) -> Tensor:
    """The product with its row factors applied; a dense one as it is."""
    return product.values * product.scales[:, None] if isinstance(product, ScaledRows) else product


def joined(products: Sequence[Product]) -> Product:
    """Products of one linear, one below the other."""
    dense_parts = [part for part in products if not isinstance(part, ScaledRows)]
    if dense_parts:
        return torch.cat(dense_parts)
    parts = [part for part in products if isinstance(part, ScaledRows)]
    return ScaledRows(torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]))
