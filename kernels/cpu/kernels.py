"""The CPU kernel set in torch alone: needs no compiler, serves where the native half cannot be built."""

import torch
from torch import Tensor

from kernels.api import AttentionPlan, BestOutputs, HeadNorms, Linear
from kernels.cpu import sampling
from kernels.cpu.attention import CpuAttention
from kernels.cpu.feed_forward import in_pieces
from kernels.cpu.int8 import make_int8_linear
from kernels.cpu.linear import make_linear
from kernels.cpu.pointwise import rms_norm, rotary, silu_mul
from kernels.cpu.stored import StoredAttention
from kernels.kv import AttentionRows, LayerKV
from kernels.reference.quant import quantise_weight, to_rows
from kernels.rows import Product, RowFormat, Rows, dense


class TorchKernels:
    """Packed linears, attention by the rows of a head group, no Python loop over tokens."""

    name = "cpu-torch"

    def __init__(self, note: str = "") -> None:
        self.note = note
        self._steps: list[CpuAttention | StoredAttention] = []  # of the latest plan, one for each form of a layer

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, row_format: RowFormat, *, wide: bool = False, tied: bool = False
    ) -> Linear:
        if row_format.is_int8:
            return make_int8_linear(*quantise_weight(weight, row_format.hadamard), bias, row_format)
        return make_linear(weight, bias, row_format)

    def add_rms_norm(
        self, residual: Tensor, delta: Product | None, weight: Tensor, eps: float, row_format: RowFormat
    ) -> Rows:
        if delta is not None:
            residual.add_(dense(delta))
        return to_rows(rms_norm(residual, weight, eps), row_format)

    def rotary_write_kv(self, qkv: Product, norms: HeadNorms | None, kv: LayerKV, plan: AttentionPlan) -> AttentionRows:
        num_kv_heads, _, head_dim = kv.body.shape[2:]
        heads = dense(qkv).view(len(plan.slots), -1, head_dim)  # [T, H + 2K, D]
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            query, key = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
        dtype = kv.compute_dtype
        exact = self._planned(kv, plan).write(kv, rotary(key, plan.cos, plan.sin, dtype), value.to(dtype))
        return AttentionRows(rotary(query, plan.cos, plan.sin, dtype), exact)

    def attention(self, rows: AttentionRows, kv: LayerKV, plan: AttentionPlan) -> Tensor:
        return self._planned(kv, plan).attend(rows, kv)

    def silu_mul(self, gate_up: Product, row_format: RowFormat) -> Rows:
        return to_rows(silu_mul(dense(gate_up)), row_format)

    def feed_forward(self, rows: Rows, gate_up: Linear, down: Linear) -> Product:
        return in_pieces(lambda some: down(self.silu_mul(gate_up(some), down.row_format)), rows)

    def best_outputs(self, rows: Rows, head: Linear) -> BestOutputs:
        return sampling.best_outputs(dense(head(rows)).float())

    def _planned(self, kv: LayerKV, plan: AttentionPlan) -> CpuAttention | StoredAttention:
        if self._steps and self._steps[0].plan is not plan:
            self._steps.clear()
        for step in self._steps:
            if step.serves(kv):
                return step
        self._steps.append(CpuAttention(plan, kv) if kv.tail is None else StoredAttention(plan))
        return self._steps[-1]
