"""Readable float32 twins of the pointwise operations and the linear layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rows import RowFormat, Rows


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """x W^T + b, computed in float32 and rounded once."""

    weight: Tensor  # [out, in]
    bias: Tensor | None
    row_format: RowFormat
    dtype: torch.dtype  # of the products

    def __call__(self, rows: Rows) -> Tensor:
        assert isinstance(rows, Tensor), "a dense linear takes dense rows"
        y = rows.float() @ self.weight.float().T
        return (y if self.bias is None else y + self.bias.float()).to(self.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., X] float32."""
    x = x.float()
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of x [T, H, D] by angles [T, D / 2]; float32."""
    cos, sin = cos[:, None], sin[:, None]  # one angle for all heads
    first, second = x.float().chunk(2, -1)  # [T, H, D / 2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 F] -> [T, F] float32."""
    gate, up = gate_up.float().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up
