"""The CPU kernel set in torch alone: needs no compiler, serves where the native half cannot be built."""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor

from kernels.api import AttentionPlan
from kernels.cpu.attention import CpuAttention
from kernels.cpu.linear import PackedLinear, PlainLinear, make_linear


class CpuKernels:
    """Packed linears, attention by the rows of a head group, no Python loop over tokens."""

    name = "cpu"

    def __init__(self) -> None:
        self._step: CpuAttention | None = None  # of the latest plan: its layers follow one another

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear | PlainLinear:
        return make_linear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
        return (x * scale).mul_(weight).to(weight.dtype)

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(delta), weight, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[:, None], sin[:, None]  # one angle for all heads
        first, second = x.chunk(2, -1)  # [T, H, D / 2]; products with float32 angles are float32
        out = torch.empty(x.shape, dtype=x.dtype)
        half = first.shape[-1]
        out[..., :half] = first * cos - second * sin
        out[..., half:] = second * cos + first * sin
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def write_kv(self, key: Tensor, value: Tensor, cache: Tensor, layer: int, plan: AttentionPlan) -> None:
        self._planned(cache, plan).write(layer, key, value)

    def attention(self, query: Tensor, cache: Tensor, layer: int, plan: AttentionPlan) -> Tensor:
        return self._planned(cache, plan).attend(layer, query)

    def _planned(self, cache: Tensor, plan: AttentionPlan) -> CpuAttention:
        if self._step is None or self._step.plan is not plan or self._step.cache is not cache:
            self._step = CpuAttention(plan, cache)
        return self._step
