"""Linear layers packed once for the CPU's matrix units, through oneDNN operations that torch keeps private.

They reach about 90 % of the peak where `F.linear` reaches half. A probe with a known answer decides for each dtype
whether this torch and this CPU have them and compute right; otherwise `F.linear` serves.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor

from kernels.rows import RowFormat, Rows

_PACKING_ROWS = 64  # a packing made for 64 rows serves one row and thousands as well


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """x W^T + b on a weight in oneDNN's own layout."""

    weight: Tensor
    bias: Tensor | None
    row_format: RowFormat

    def __call__(self, rows: Rows) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, self.weight, self.bias, "none", [], "")
        return y


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """x W^T + b by torch's public operation."""

    weight: Tensor
    bias: Tensor | None
    row_format: RowFormat

    def __call__(self, rows: Rows) -> Tensor:
        assert isinstance(rows, Tensor), "a dense linear takes dense rows"
        return F.linear(rows, self.weight, self.bias)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKING_ROWS)
    return packed


@cache
def can_pack(row_format: RowFormat) -> bool:
    """Whether the private operations exist here and give the exact product of small integers."""
    weight = (torch.arange(48 * 64).view(48, 64) % 7 - 3).to(row_format.dtype)
    x = (torch.arange(5 * 64).view(5, 64) % 5 - 2).to(row_format.dtype)
    bias = (torch.arange(48) % 3).to(row_format.dtype)
    exact = x.double() @ weight.double().T + bias.double()
    try:
        product = PackedLinear(_pack(weight), bias, row_format)(x)
        return bool((product.double() - exact).abs().max() <= exact.abs().max() * 2**-8)
    except (AttributeError, RuntimeError):  # a torch without the operations, or one that refuses this CPU or this dtype
        return False


def make_linear(weight: Tensor, bias: Tensor | None, row_format: RowFormat) -> PackedLinear | PlainLinear:
    """The fastest right form of a linear over dense rows here, in the dtype of the rows."""
    weight = weight.to(row_format.dtype)
    bias = bias.to(row_format.dtype) if bias is not None else None
    if can_pack(row_format):
        return PackedLinear(_pack(weight.contiguous()), bias, row_format)
    return PlainLinear(weight, bias, row_format)
