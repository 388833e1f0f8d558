"""The contract of a kernel set: tensors in, tensors out; knows no model, no file and no request.

Shape letters, used by every file under `kernels/` and `engine/models/`:
T tokens of a step, S sequences, R rows whose logits are wanted, M blocks of a block table, N blocks of the cache,
B tokens a block, L layers, H query heads, K key/value heads, G = H / K query heads of a group, D head dimension,
E hidden size, F intermediate size, V vocabulary.
"""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from kernels.kv import AttentionRows, LayerKV
from kernels.rows import Product, RowFormat, Rows

# Largest absolute difference to the float32 twin in `kernels.reference` for inputs of unit variance. A bfloat16 keeps
# eight bits, so one rounding of a value near 4 costs 2**-7; attention and linears round twice.
TOLERANCES = MappingProxyType(
    {
        ("linear", torch.float32): 1e-4,
        ("linear", torch.bfloat16): 1.5e-1,
        ("add_rms_norm", torch.float32): 1e-5,
        ("add_rms_norm", torch.bfloat16): 3e-2,
        ("rotary_write_kv", torch.float32): 1e-5,
        ("rotary_write_kv", torch.bfloat16): 3e-2,
        ("silu_mul", torch.float32): 1e-5,
        ("silu_mul", torch.bfloat16): 6e-2,
        ("attention", torch.float32): 2e-5,
        ("attention", torch.bfloat16): 4e-2,
    }
)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where the rows of one step lie in the paged cache. One plan serves all layers of a step.

    Rows of sequence s are query_starts[s]:query_starts[s + 1] and are its last positions; `kv_lens` counts its tokens
    with these rows included. A row is stored at slot = block * block_size + offset in the block.
    """

    query_starts: list[int]  # S + 1
    kv_lens: list[int]  # S
    block_tables: Tensor  # [S, M] int64, padded with any valid block
    slots: Tensor  # [T] int64
    block_size: int
    cos: Tensor  # [T, D / 2] float32, of the angles of each row's position
    sin: Tensor
    tail_slots: list[int] = field(default_factory=list)  # S; empty where no layer has a tail

    def start(self, s: int) -> int:
        """Position of the first row of sequence s."""
        return self.kv_lens[s] - (self.query_starts[s + 1] - self.query_starts[s])

    def start_of_block(self, s: int) -> int:
        """Position at which the block of the first row of sequence s begins."""
        return self.start(s) // self.block_size * self.block_size

    def exact_starts(self) -> list[int]:
        """S + 1: where the rows of each sequence begin in `AttentionRows.exact`."""
        starts = [0]
        for s, kv_len in enumerate(self.kv_lens):
            has_rows = self.query_starts[s] < self.query_starts[s + 1]
            starts.append(starts[-1] + (kv_len - self.start_of_block(s) if has_rows else 0))
        return starts

    def positions(self, s: int) -> Tensor:
        """Positions of the rows of sequence s in it."""
        return torch.arange(self.start(s), self.kv_lens[s])


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every head of q and of k, before the rotation."""

    query: Tensor  # [D]
    key: Tensor  # [D]
    eps: float


class Linear(Protocol):
    """A weight prepared once; a weight that is kept as given is not copied."""

    @property
    def row_format(self) -> RowFormat:
        """The form of rows that it takes without a conversion."""

    def __call__(self, rows: Rows) -> Product:
        """[T, in] -> [T, out]. A linear over int8 rows rounds dense ones itself, unless it wants them rotated."""


@dataclass(frozen=True, slots=True)
class BestOutputs:
    """Of the outputs of a linear, row by row."""

    ids: Tensor  # [R] int64: the largest, the first of equal ones
    are_finite: Tensor  # [R] bool: whether all outputs of the row are; its id means nothing otherwise


class Kernels(Protocol):
    """All operations of a decoder. Every operation is independent of batch mates up to float rounding.

    `rotary_write_kv` of a layer comes before its `attention`, so a row may attend to what another row of the step has
    written.
    """

    name: str
    note: str  # the variant that runs, or why it is not the fastest

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, row_format: RowFormat, *, wide: bool = False, tied: bool = False
    ) -> Linear:
        """Prepare weight [out, in] and bias [out]: as it is for dense rows, with one scale per output channel for int8
        rows. Rotating the weight to fit rotated rows is done here. `wide` asks for products that are not rounded to
        bfloat16, as logits should not be; a set that cannot gives rounded ones. The weight of a `tied` one is kept
        elsewhere too, so that a copy in another order would cost memory. Raises ValueError for a format that this
        machine cannot compute right."""

    def add_rms_norm(
        self, residual: Tensor, delta: Product | None, weight: Tensor, eps: float, row_format: RowFormat
    ) -> Rows:
        """residual [T, E] float32 += delta, in place; returns residual / sqrt(mean(residual^2) + eps) * weight over the
        last dimension, computed in float32, in the form that the next linear takes: never rotated, since a model
        that wants that after a norm rotates its weights instead."""

    def rotary_write_kv(self, qkv: Product, norms: HeadNorms | None, kv: LayerKV, plan: AttentionPlan) -> AttentionRows:
        """[T, (H + 2K) D] -> rows in compute dtype: rotate the halves of q and k by the plan's angles (after `norms`)
        and store k and v of one layer at the slots of the rows, or where the layer has a tail there, and each block
        that is full now, rounded from compute dtype, in the body."""

    def attention(self, rows: AttentionRows, kv: LayerKV, plan: AttentionPlan) -> Tensor:
        """[T, H, D] -> [T, H, D]: softmax(q k / sqrt(D)) v over the positions up to and including the row's own, those
        of the row's own block in compute dtype and all before as they are stored.

        Memory that no position of a sequence owns never reaches a result, whatever it holds (NaN included).
        """

    def silu_mul(self, gate_up: Product, row_format: RowFormat) -> Rows:
        """[T, 2 F] -> [T, F]: silu of the first half times the second, in the form that the next linear takes."""

    def feed_forward(self, rows: Rows, gate_up: Linear, down: Linear) -> Product:
        """[T, E] -> [T, E]: `down` of `silu_mul` of `gate_up`, as many rows at once as the device likes best."""

    def best_outputs(self, rows: Rows, head: Linear) -> BestOutputs:
        """rows [R, E] -> the best of the R x V outputs of `head`, row by row, which need not be kept."""
