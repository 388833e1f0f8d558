"""The reference kernel set: written to be read, in plain torch float32."""

import torch
from torch import Tensor

from kernels.api import AttentionPlan, HeadNorms, Linear
from kernels.reference import attention, layers, quant
from kernels.rows import Product, RowFormat, Rows, dense


class ReferenceKernels:
    """Every operation as its formula says; results are rounded to the compute dtype once, at the end."""

    name = "reference"
    note = "slow, for comparison"

    def pack_linear(self, weight: Tensor, bias: Tensor | None, row_format: RowFormat, *, wide: bool = False) -> Linear:
        if row_format.is_int8:
            return quant.ReferenceInt8Linear(*quant.quantise_weight(weight, row_format.hadamard), bias, row_format)
        return layers.ReferenceLinear(weight, bias, row_format, torch.float32 if wide else weight.dtype)

    def add_rms_norm(
        self, residual: Tensor, delta: Product | None, weight: Tensor, eps: float, row_format: RowFormat
    ) -> Rows:
        if delta is not None:
            residual.add_(dense(delta))
        return quant.to_rows(layers.rms_norm(residual, weight, eps), row_format)

    def rotary_write_kv(
        self, qkv: Product, norms: HeadNorms | None, cache: Tensor, layer: int, plan: AttentionPlan
    ) -> Tensor:
        num_kv_heads, _, head_dim = cache.shape[3:]
        heads = dense(qkv).float().view(len(plan.slots), -1, head_dim)  # [T, H + 2K, D]
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            query = layers.rms_norm(query, norms.query, norms.eps)
            key = layers.rms_norm(key, norms.key, norms.eps)
        attention.write_kv(layers.rotary(key, plan.cos, plan.sin), value, cache, layer, plan)
        return layers.rotary(query, plan.cos, plan.sin).to(cache.dtype)

    def attention(self, query: Tensor, cache: Tensor, layer: int, plan: AttentionPlan) -> Tensor:
        return attention.attention(query, cache, layer, plan)

    def silu_mul(self, gate_up: Product, row_format: RowFormat) -> Rows:
        return quant.to_rows(layers.silu_mul(dense(gate_up)), row_format)
