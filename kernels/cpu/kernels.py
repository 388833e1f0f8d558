"""The CPU kernel set in torch alone: needs no compiler, serves where the native half cannot be built."""

import torch
from torch import Tensor

from kernels.api import AttentionPlan, HeadNorms, Linear
from kernels.cpu.attention import CpuAttention
from kernels.cpu.int8 import make_int8_linear
from kernels.cpu.linear import make_linear
from kernels.cpu.pointwise import rms_norm, rotary, silu_mul
from kernels.reference.quant import quantise_weight, to_rows
from kernels.rows import Product, RowFormat, Rows, dense


class TorchKernels:
    """Packed linears, attention by the rows of a head group, no Python loop over tokens."""

    name = "cpu-torch"

    def __init__(self, note: str = "") -> None:
        self.note = note
        self._step: CpuAttention | None = None  # of the latest plan: its layers follow one another

    def pack_linear(self, weight: Tensor, bias: Tensor | None, row_format: RowFormat, *, wide: bool = False) -> Linear:
        if row_format.is_int8:
            return make_int8_linear(*quantise_weight(weight, row_format.hadamard), bias, row_format)
        return make_linear(weight, bias, row_format)

    def add_rms_norm(
        self, residual: Tensor, delta: Product | None, weight: Tensor, eps: float, row_format: RowFormat
    ) -> Rows:
        if delta is not None:
            residual.add_(dense(delta))
        return to_rows(rms_norm(residual, weight, eps), row_format)

    def rotary_write_kv(
        self, qkv: Product, norms: HeadNorms | None, cache: Tensor, layer: int, plan: AttentionPlan
    ) -> Tensor:
        num_kv_heads, _, head_dim = cache.shape[3:]
        heads = dense(qkv).view(len(plan.slots), -1, head_dim)  # [T, H + 2K, D]
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            query, key = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
        self._planned(cache, plan).write(layer, rotary(key, plan.cos, plan.sin, cache.dtype), value.to(cache.dtype))
        return rotary(query, plan.cos, plan.sin, cache.dtype)

    def attention(self, query: Tensor, cache: Tensor, layer: int, plan: AttentionPlan) -> Tensor:
        return self._planned(cache, plan).attend(layer, query)

    def silu_mul(self, gate_up: Product, row_format: RowFormat) -> Rows:
        return to_rows(silu_mul(dense(gate_up)), row_format)

    def _planned(self, cache: Tensor, plan: AttentionPlan) -> CpuAttention:
        if self._step is None or self._step.plan is not plan or self._step.cache is not cache:
            self._step = CpuAttention(plan, cache)
        return self._step
