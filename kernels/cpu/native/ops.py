"""The typed face of the native operations. Shape letters are those of `kernels.api`; all tensors are contiguous, but
the blocks of a layer may lie apart."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NativeOps:
    """One loaded variant. A result of a row never depends on its batch mates, but for float rounding in `attention`
    where a prefix is shared. Every operation raises RuntimeError on tensors it was not made for."""

    isa: str
    library: Path

    @property
    def has_tiles(self) -> bool:
        """Whether the `tile_` operations may be called."""
        return self.isa in ("amx", "v4")

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor | None, delta_scales: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        """residual [T, E] float32 += delta * delta_scales[:, None], in place; its RMSNorm in the weight's dtype."""
        return _tensor(torch.ops.v4flash.add_rms_norm(residual, delta, delta_scales, weight, eps))

    def add_rms_norm_int8(
        self, residual: Tensor, delta: Tensor | None, delta_scales: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """As `add_rms_norm`, quantised as by `quantise_rows`."""
        return _pair(torch.ops.v4flash.add_rms_norm_int8(residual, delta, delta_scales, weight, eps))

    def silu_mul(self, gate_up: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """[T, 2 F], times scales [T], -> [T, F]: silu of the first half times the second."""
        return _tensor(torch.ops.v4flash.silu_mul(gate_up, scales, dtype))

    def quantise_rows(self, x: Tensor, hadamard: int = 0) -> tuple[Tensor, Tensor]:
        """[T, X] -> rows u8 = round(x / scale) + 128 and scales [T] float32 = largest magnitude / 127, after a
        normalised Hadamard (Sylvester's order) on each block of `hadamard` neighbours (0: none, or 64 where that
        divides X)."""
        return _pair(torch.ops.v4flash.quantise_rows(x, hadamard))

    def rotary_write_kv(
        self,
        qkv: Tensor,
        scales: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        body: Tensor,
        num_heads: int,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """qkv [T, (H + 2 K) D], times scales [T]: query and key over their root mean square times the norms [D] where
        given, halves rotated by cos, sin [T, D / 2]; key and value to slots [T] int64 of body [N, 2, K, B, D], rounded
        once. Returns the query [T, H, D] in the body's dtype."""
        return _tensor(
            torch.ops.v4flash.rotary_write_kv(qkv, scales, cos, sin, slots, body, num_heads, query_norm, key_norm, eps)
        )

    def attention(
        self,
        query: Tensor,
        body: Tensor,
        query_starts: Tensor,
        kv_lens: Tensor,
        block_tables: Tensor,
        shared_groups: Tensor,
        exact: Tensor | None = None,
        body_scales: Tensor | None = None,
        group_size: int = 64,
    ) -> Tensor:
        """Causal attention of ragged rows [T, H, D], prefill chunks and decode rows in one call; tables as in
        `AttentionPlan`, int32. shared_groups [groups, 3] int32: (first sequence, number of sequences, number of leading
        blocks that all of them share and that lie before their rows), ascending; shared keys are read once for all.
        A layer in another form than the query's has `exact`, of which each row reads its own block."""
        return _tensor(
            torch.ops.v4flash.attention(
                query, body, query_starts, kv_lens, block_tables, shared_groups, exact, body_scales, group_size
            )
        )

    def stored_rotary_write(
        self,
        qkv: Tensor,
        scales: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        query_starts: Tensor,
        kv_lens: Tensor,
        block_tables: Tensor,
        tail_slots: Tensor,
        body: Tensor,
        body_scales: Tensor | None,
        tail: Tensor,
        group_size: int,
        num_heads: int,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """As `rotary_write_kv`, for a layer in another form than `tail` [slots, 2, K, B - 1, D]: gives the query and
        `AttentionRows.exact`. Blocks that are full now are rounded into the body, other rows stay in their tail."""
        return _pair(
            torch.ops.v4flash.stored_rotary_write(
                qkv,
                scales,
                cos,
                sin,
                query_starts,
                kv_lens,
                block_tables,
                tail_slots,
                body,
                body_scales,
                tail,
                group_size,
                num_heads,
                query_norm,
                key_norm,
                eps,
            )
        )

    def matvec(
        self, x: Tensor, weight: Tensor, weight_scales: Tensor | None = None, x_scales: Tensor | None = None
    ) -> Tensor:
        """x [T <= 4, X] times weight [O, X], both floats, or rows of `quantise_rows` and int8: [T, O] float32, times
        the scales of the outputs [O] and of the rows [T]."""
        return _tensor(torch.ops.v4flash.matvec(x, weight, weight_scales, x_scales))

    def tile_pack(self, weight: Tensor) -> Tensor:
        """Weight [O, X] bfloat16 or int8 in tiles, padded with zeros."""
        return _tensor(torch.ops.v4flash.tile_pack(weight))

    def tile_linear(
        self,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None,
        num_outputs: int,
        dtype: torch.dtype = torch.bfloat16,
        out: Tensor | None = None,
    ) -> Tensor:
        """x [T, X] bfloat16 times a packed bfloat16 weight, plus bias [O] bfloat16 -> `out` [T, O] where given, else a
        new one of `dtype`; rounded once to the dtype of that, float32 or bfloat16."""
        shape = (x.shape[0], num_outputs)  # `len` of a tensor takes three times as long
        out = x.new_empty(shape, dtype=dtype) if out is None else out
        assert out.shape == shape
        torch.ops.v4flash.tile_linear(x, packed, bias, out)
        return out

    def tile_linear_int8(
        self,
        x: Tensor,
        packed: Tensor,
        scales: Tensor,
        zeros: Tensor,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """x [T, X] uint8 times a packed int8 weight, exact, less zeros [O] int32, times scales [O] -> [T, O] as that
        of `tile_linear`."""
        shape = (x.shape[0], scales.shape[0])
        out = x.new_empty(shape, dtype=dtype) if out is None else out
        assert out.shape == shape
        torch.ops.v4flash.tile_linear_int8(x, packed, scales, zeros, out)
        return out

    def tile_gate(self, x: Tensor, packed: Tensor) -> Tensor:
        """`silu_mul` of x [T, X] bfloat16 times a packed bfloat16 weight [2 F, X] -> [T, F], rounded once. F is a
        multiple of 64."""
        return _tensor(torch.ops.v4flash.tile_gate(x, packed))

    def tile_gate_int8(
        self, x: Tensor, x_scales: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, hadamard: int
    ) -> tuple[Tensor, Tensor]:
        """`quantise_rows` of `silu_mul` in bfloat16 of `tile_linear_int8` in float32 of x [T, X] with scales of its
        rows [T], to the bit. F is a multiple of 64."""
        return _pair(torch.ops.v4flash.tile_gate_int8(x, x_scales, packed, scales, zeros, hadamard))

    def wide_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, X] times weight [O, X], bfloat16, as they lie in memory -> [T, O] float32, not rounded."""
        return _tensor(torch.ops.v4flash.wide_linear(x, weight))

    def wide_best(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of each row's outputs of `wide_linear`, the first of equal ones: numbers [T] int64, and [T] bool
        whether all outputs of the row are finite; else its number means nothing."""
        return _pair(torch.ops.v4flash.wide_best(x, weight))

    def tile_best(self, x: Tensor, packed: Tensor, num_outputs: int) -> tuple[Tensor, Tensor]:
        """As `wide_best`, of `tile_linear` without a bias in float32."""
        return _pair(torch.ops.v4flash.tile_best(x, packed, num_outputs))


def _tensor(result: object) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def _pair(result: object) -> tuple[Tensor, Tensor]:
    assert isinstance(result, tuple)
    rows, scales = result
    return rows, scales
