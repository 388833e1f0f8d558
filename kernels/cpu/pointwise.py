"""Pointwise operations of the CPU in torch alone; their readable twins are in `kernels.reference.layers`."""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., X] in any dtype -> float32."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))).mul_(weight)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate the halves of x [T, H, D] by angles [T, D / 2], rounded to `dtype`."""
    cos, sin = cos[:, None], sin[:, None]  # one angle for all heads
    first, second = x.chunk(2, -1)  # [T, H, D / 2]; products with float32 angles are float32
    out = torch.empty(x.shape, dtype=dtype)
    half = first.shape[-1]
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 F] -> [T, F] in the dtype of its input."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
