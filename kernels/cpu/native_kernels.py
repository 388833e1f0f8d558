"""The CPU kernel set whose operations are compiled. Linears are compiled where the variant has tiles, else oneDNN's."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.api import AttentionPlan, BestOutputs, HeadNorms, Linear
from kernels.cpu.feed_forward import filled_in_pieces, in_pieces
from kernels.cpu.few_rows import FewRowsInt8Linear
from kernels.cpu.int8 import make_int8_linear
from kernels.cpu.linear import make_linear
from kernels.cpu.native.ops import NativeOps
from kernels.cpu.sampling import best_outputs
from kernels.cpu.sharing import shared_groups
from kernels.cpu.tiles import TileInt8Linear, TileLinear, make_tile_int8_linear, make_tile_linear
from kernels.cpu.wide import WideLinear
from kernels.kv import AttentionRows, LayerKV
from kernels.reference.quant import quantise_weight
from kernels.rows import Product, QuantRows, RowFormat, Rows, ScaledRows, dense


@dataclass(frozen=True, slots=True)
class _Indices:
    """A plan in the 32-bit integers that the operations read."""

    plan: AttentionPlan
    query_starts: Tensor  # [S + 1]
    kv_lens: Tensor  # [S]
    block_tables: Tensor  # [S, M]
    tail_slots: Tensor  # [S], or empty
    shared: Tensor  # [groups, 3]

    @classmethod
    def of(cls, plan: AttentionPlan) -> "_Indices":
        groups = [(g.first, g.num_seqs, g.num_blocks) for g in shared_groups(plan)]
        return cls(
            plan,
            torch.tensor(plan.query_starts, dtype=torch.int32),
            torch.tensor(plan.kv_lens, dtype=torch.int32),
            plan.block_tables.int(),
            torch.tensor(plan.tail_slots, dtype=torch.int32),
            torch.tensor(groups, dtype=torch.int32).view(-1, 3),
        )


def _split(product: Product) -> tuple[Tensor, Tensor | None]:
    return (product.values, product.scales) if isinstance(product, ScaledRows) else (product, None)


class NativeKernels:
    """Over a variant of the compiled operations, which `kernels.cpu.native.load_native` found to compute right."""

    name = "cpu-native"

    def __init__(self, ops: NativeOps, *, few_rows: bool = True) -> None:
        self._ops = ops
        self._few_rows = few_rows
        self._indices: _Indices | None = None  # of the latest plan: its layers follow one another
        self.note = f"compiled operations, {ops.isa}"

    def quantise(self, x: Tensor) -> QuantRows:
        return QuantRows(*self._ops.quantise_rows(x))

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, row_format: RowFormat, *, wide: bool = False, tied: bool = False
    ) -> Linear:
        if row_format.is_int8:
            codes, scales = quantise_weight(weight, row_format.hadamard)
            if self._ops.has_tiles:
                dtype = torch.float32 if wide else torch.bfloat16
                return make_tile_int8_linear(codes, scales, bias, row_format, self._ops, self.quantise, dtype)
            packed = make_int8_linear(codes, scales, bias, row_format, self.quantise)
            return FewRowsInt8Linear(packed, codes.contiguous(), self._ops) if self._few_rows else packed
        if row_format is RowFormat.BF16 and self._ops.has_tiles and not tied:
            return make_tile_linear(weight, bias, self._ops, torch.float32 if wide else torch.bfloat16)
        if row_format is RowFormat.BF16 and wide and bias is None:
            return WideLinear(weight.to(torch.bfloat16).contiguous(), self._ops)
        return make_linear(weight, bias, row_format)

    def add_rms_norm(
        self, residual: Tensor, delta: Product | None, weight: Tensor, eps: float, row_format: RowFormat
    ) -> Rows:
        assert row_format is not RowFormat.ROTATED_INT8, "a norm's rows are rotated in the weights"
        values, scales = (None, None) if delta is None else _split(delta)
        if row_format.is_int8:
            return QuantRows(*self._ops.add_rms_norm_int8(residual, values, scales, weight, eps))
        return self._ops.add_rms_norm(residual, values, scales, weight, eps)

    def rotary_write_kv(self, qkv: Product, norms: HeadNorms | None, kv: LayerKV, plan: AttentionPlan) -> AttentionRows:
        values, scales = _split(qkv)
        num_kv_heads, _, head_dim = kv.body.shape[2:]
        num_heads = values.shape[1] // head_dim - 2 * num_kv_heads
        query_norm, key_norm, eps = (norms.query, norms.key, norms.eps) if norms else (None, None, 0.0)
        if kv.tail is None:
            return AttentionRows(
                self._ops.rotary_write_kv(
                    values, scales, plan.cos, plan.sin, plan.slots, kv.body, num_heads, query_norm, key_norm, eps
                )
            )
        at = self._planned(plan)
        return AttentionRows(
            *self._ops.stored_rotary_write(
                values,
                scales,
                plan.cos,
                plan.sin,
                at.query_starts,
                at.kv_lens,
                at.block_tables,
                at.tail_slots,
                kv.body,
                kv.scales,
                kv.tail,
                kv.group_size,
                num_heads,
                query_norm,
                key_norm,
                eps,
            )
        )

    def attention(self, rows: AttentionRows, kv: LayerKV, plan: AttentionPlan) -> Tensor:
        at = self._planned(plan)
        tables = at.query_starts, at.kv_lens, at.block_tables, at.shared
        return self._ops.attention(rows.query, kv.body, *tables, rows.exact, kv.scales, kv.group_size)

    def _planned(self, plan: AttentionPlan) -> _Indices:
        if self._indices is None or self._indices.plan is not plan:
            self._indices = _Indices.of(plan)
        return self._indices

    def silu_mul(self, gate_up: Product, row_format: RowFormat) -> Rows:
        values, scales = _split(gate_up)
        if row_format.is_int8:
            gated = self._ops.silu_mul(values, scales, torch.bfloat16)
            return QuantRows(*self._ops.quantise_rows(gated, row_format.hadamard))
        return self._ops.silu_mul(values, scales, row_format.dtype)

    def feed_forward(self, rows: Rows, gate_up: Linear, down: Linear) -> Product:
        def gated(rows: Rows) -> Rows:
            if isinstance(gate_up, TileLinear | TileInt8Linear) and gate_up.can_gate(down.row_format):
                return gate_up.gated(rows, down.row_format)
            return self.silu_mul(gate_up(rows), down.row_format)

        if isinstance(down, TileLinear | TileInt8Linear) and down.bias is None:
            return filled_in_pieces(lambda some, room: down(gated(some), room), rows, down.room(len(rows)))
        return in_pieces(lambda some: down(gated(some)), rows)

    def best_outputs(self, rows: Rows, head: Linear) -> BestOutputs:
        best = head.best(rows) if isinstance(head, TileLinear | WideLinear) else None
        return best or best_outputs(dense(head(rows)).float())
