"""Attention in torch alone over layers whose full blocks are stored in another form than the one that is computed in.

The blocks that a step reads are widened to float32 into pages of their own, and so are the blocks that it writes. The
rows of a sequence are cut where a block ends: each piece is a short sequence, whose own block is the last of its table.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.api import AttentionPlan
from kernels.cpu.attention import CpuAttention
from kernels.kv import AttentionRows, LayerKV
from kernels.reference.cache import quantise_kv, read_blocks, stored


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one sequence in one block, first:end of the step's, and where the block lies in `AttentionRows.exact`."""

    seq: int
    index: int  # of the block in its table
    first: int
    end: int
    exact_start: int
    kv_len: int  # of the sequence, up to the last row of the piece

    def num_kept(self, size: int) -> int:
        """Tokens of the block up to the last row of the piece."""
        return self.kv_len - self.index * size


def _cut(plan: AttentionPlan) -> list[_Piece]:
    pieces, size, exact_starts = [], plan.block_size, plan.exact_starts()
    for s, kv_len in enumerate(plan.kv_lens):
        start, first_block = plan.start(s), plan.start(s) // size
        position = start
        while position < kv_len:
            index = position // size
            end = min(kv_len, (index + 1) * size)
            row, exact = plan.query_starts[s] - start, exact_starts[s] + (index - first_block) * size
            pieces.append(_Piece(s, index, row + position, row + end, exact, end))
            position = end
    return pieces


class StoredAttention:
    """Indices of one plan, made once and used by all layers that have a tail."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan, size = plan, plan.block_size
        pieces = _cut(plan)
        self._used, dense_ids = torch.unique(
            torch.cat([plan.block_tables[p.seq, : p.index] for p in pieces]), return_inverse=True
        )
        tables = torch.zeros(len(pieces), max(p.index for p in pieces) + 1, dtype=torch.int64)
        for i, (piece, own) in enumerate(zip(pieces, dense_ids.split([p.index for p in pieces]), strict=True)):
            tables[i, : piece.index] = own
            tables[i, piece.index] = len(self._used) + i
        starts = [*(p.first for p in pieces), pieces[-1].end]
        self._pieces = replace(plan, query_starts=starts, kv_lens=[p.kv_len for p in pieces], block_tables=tables)
        self._plan_rows(plan, pieces)
        full = [p for p in pieces if p.kv_len == (p.index + 1) * size]
        self._full_blocks = torch.tensor([int(plan.block_tables[p.seq, p.index]) for p in full], dtype=torch.int64)
        self._full_rows = torch.tensor([p.exact_start for p in full], dtype=torch.int64)[:, None] + torch.arange(size)
        own_starts = torch.tensor([p.exact_start for p in pieces])[:, None]
        kept = torch.tensor([p.num_kept(size) for p in pieces])[:, None]
        self._own_rows = own_starts + torch.minimum(torch.arange(size), kept - 1)  # what lies past the end is hidden
        self._attention: CpuAttention | None = None  # over the widened pages

    def _plan_rows(self, plan: AttentionPlan, pieces: list[_Piece]) -> None:
        """Which rows of `exact` come from a tail, which are new, and which stay in a tail for later."""
        size = plan.block_size
        old: list[tuple[int, int, int]] = []  # row of exact, tail slot, offset
        new: list[int] = []
        left: list[tuple[int, int, int]] = []
        for piece in pieces:
            slot = plan.tail_slots[piece.seq]
            num_kept = piece.num_kept(size)
            num_old = num_kept - (piece.end - piece.first)
            old += [(piece.exact_start + i, slot, i) for i in range(num_old)]
            new += range(piece.exact_start + num_old, piece.exact_start + num_kept)
            if num_kept < size:
                left += [(piece.exact_start + i, slot, i) for i in range(num_old, num_kept)]
        self._old = torch.tensor(old, dtype=torch.int64).view(-1, 3)
        self._new = torch.tensor(new, dtype=torch.int64)
        self._left = torch.tensor(left, dtype=torch.int64).view(-1, 3)
        self._num_exact = plan.exact_starts()[-1]

    def serves(self, kv: LayerKV) -> bool:
        return kv.tail is not None

    def write(self, kv: LayerKV, key: Tensor, value: Tensor) -> Tensor:
        exact = key.new_empty((self._num_exact, 2, *key.shape[1:]))  # [X, 2, K, D]
        exact[self._new] = torch.stack((key, value), 1)
        assert kv.tail is not None
        rows, slots, offsets = self._old.unbind(1)
        exact[rows] = kv.tail[slots, :, :, offsets]
        pages = exact[self._full_rows].permute(0, 2, 3, 1, 4)  # [full blocks, 2, K, B, D]
        if kv.scales is None:
            kv.body[self._full_blocks] = stored(pages, kv.body.dtype)
        else:
            kv.body[self._full_blocks], kv.scales[self._full_blocks] = quantise_kv(pages, kv.group_size)
        rows, slots, offsets = self._left.unbind(1)
        kv.tail[slots, :, :, offsets] = exact[rows]
        return exact

    def attend(self, rows: AttentionRows, kv: LayerKV) -> Tensor:
        assert rows.exact is not None
        own = rows.exact[self._own_rows].permute(0, 2, 3, 1, 4).float()
        pages = LayerKV(torch.cat((read_blocks(kv, self._used), own)))
        if self._attention is None:
            self._attention = CpuAttention(self._pieces, pages)
        return self._attention.attend(AttentionRows(rows.query.float()), pages).to(rows.query.dtype)
