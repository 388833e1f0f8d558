"""The reference kernel set: written to be read, in plain torch float32."""

import torch
from torch import Tensor

from kernels.api import AttentionPlan, BestOutputs, HeadNorms, Linear
from kernels.kv import AttentionRows, LayerKV
from kernels.reference import attention, cache, layers, quant, sampling
from kernels.rows import Product, RowFormat, Rows, dense


class ReferenceKernels:
    """Every operation as its formula says; results are rounded to the compute dtype once, at the end."""

    name = "reference"
    note = "slow, for comparison"

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, row_format: RowFormat, *, wide: bool = False, tied: bool = False
    ) -> Linear:
        if row_format.is_int8:
            return quant.ReferenceInt8Linear(*quant.quantise_weight(weight, row_format.hadamard), bias, row_format)
        return layers.ReferenceLinear(weight, bias, row_format, torch.float32 if wide else weight.dtype)

    def add_rms_norm(
        self, residual: Tensor, delta: Product | None, weight: Tensor, eps: float, row_format: RowFormat
    ) -> Rows:
        if delta is not None:
            residual.add_(dense(delta))
        return quant.to_rows(layers.rms_norm(residual, weight, eps), row_format)

    def rotary_write_kv(self, qkv: Product, norms: HeadNorms | None, kv: LayerKV, plan: AttentionPlan) -> AttentionRows:
        num_kv_heads, _, head_dim = kv.body.shape[2:]
        heads = dense(qkv).float().view(len(plan.slots), -1, head_dim)  # [T, H + 2K, D]
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            query = layers.rms_norm(query, norms.query, norms.eps)
            key = layers.rms_norm(key, norms.key, norms.eps)
        exact = cache.write_kv(layers.rotary(key, plan.cos, plan.sin), value, kv, plan)
        return AttentionRows(layers.rotary(query, plan.cos, plan.sin).to(kv.compute_dtype), exact)

    def attention(self, rows: AttentionRows, kv: LayerKV, plan: AttentionPlan) -> Tensor:
        return attention.attention(rows, kv, plan)

    def silu_mul(self, gate_up: Product, row_format: RowFormat) -> Rows:
        return quant.to_rows(layers.silu_mul(dense(gate_up)), row_format)

    def feed_forward(self, rows: Rows, gate_up: Linear, down: Linear) -> Product:
        return down(self.silu_mul(gate_up(rows), down.row_format))

    def best_outputs(self, rows: Rows, head: Linear) -> BestOutputs:
        logits = dense(head(rows)).float()
        return BestOutputs(sampling.greedy(logits), sampling.finite_rows(logits))
