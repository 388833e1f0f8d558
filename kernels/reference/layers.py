"""Readable float32 twins of the pointwise operations and the linear layer."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """x W^T + b, computed in float32 and rounded once to the dtype of the weight."""

    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y = x.float() @ self.weight.float().T
        return (y if self.bias is None else y + self.bias.float()).to(self.weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(weight.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]  # one angle for all heads
    first, second = x.float().chunk(2, -1)  # [T, H, D / 2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
