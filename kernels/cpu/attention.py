"""Paged attention in torch alone. Sequences of one query length are batched: their pages are gathered by one
`index_select`, and the heads of a group are rows of one matrix product. Long prefills go one by one through SDPA.

A group of sequences whose block tables begin alike reads that prefix once, in one product for all of them.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor

from kernels.api import AttentionPlan
from kernels.kv import AttentionRows, LayerKV

_MAX_BATCHED_QUERY = 64  # longer prefills fill SDPA's own tiles
_MAX_BATCHED_ROWS = 1024  # bounds the score matrix of a group
_MAX_PADDING = 0.25  # a shorter sequence opens a new group
_MIN_SHARED_BLOCKS, _MIN_SHARING_SEQS = 4, 4  # below these the second product costs more than the reads it saves


@dataclass(frozen=True, slots=True)
class _Single:
    """One prefill. `mask` is None where the whole sequence is new, so that SDPA may skip the future."""

    rows: slice
    kv_len: int
    pages: Tensor  # [2 K M] rows of the page view, layer 0
    mask: Tensor | None  # [T, kv_len] additive


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with `query_len` rows each, padded to one length of private blocks behind a shared prefix."""

    rows: Tensor  # [S query_len]
    num_seqs: int
    query_len: int
    pages: Tensor  # [2 K S M]
    shared_pages: Tensor | None  # [2 K P]
    hidden: Tensor  # [S, 1, query_len, M B] true where a row must not look
    unowned: Tensor  # value rows that belong to no position of a sequence


def _split(query_len: int, members: list[int], lens: list[int]) -> list[list[int]]:
    """Longest first; a group ends where padding or the score matrix would grow too large."""
    groups: list[list[int]] = []
    for s in sorted(members, key=lambda s: -lens[s]):
        head = groups[-1] if groups else None
        full = head is None or (len(head) + 1) * query_len > _MAX_BATCHED_ROWS
        if head is None or full or lens[s] < (1 - _MAX_PADDING) * lens[head[0]]:
            groups.append([s])
        else:
            head.append(s)
    return groups


class CpuAttention:
    """Gather indices and masks of one plan, made once and used by all layers that lie in memory as this one does.

    A page is what one block holds of the keys or values of one head, so pages of a layer are counted from its first on.
    """

    def __init__(self, plan: AttentionPlan, kv: LayerKV) -> None:
        self.plan, body = plan, kv.body
        _, _, self._num_kv_heads, self._block_size, self._head_dim = body.shape
        self._block_pages, rest = divmod(body.stride(0), self._block_size * self._head_dim)
        assert rest == 0, "blocks must be whole pages apart"
        self._dtype = body.dtype
        self._scale = 1 / math.sqrt(self._head_dim)
        lens = [end - start for start, end in pairwise(plan.query_starts)]
        size = self._block_size
        pages = (plan.slots // size * self._block_pages)[:, None] + torch.arange(2 * self._num_kv_heads)
        self._slots = pages * size + (plan.slots % size)[:, None]  # [T, 2 K] rows of a layer
        by_query: dict[int, list[int]] = {}
        for s, query_len in enumerate(lens):
            by_query.setdefault(query_len, []).append(s)
        self._groups: list[_Group] = []
        self._singles: list[_Single] = []
        for query_len, members in by_query.items():
            batched = query_len == 1 or (query_len <= _MAX_BATCHED_QUERY and len(members) > 1)
            if not batched:
                self._singles.extend(self._plan_single(plan, s) for s in members)
                continue
            for group in _split(query_len, members, plan.kv_lens):
                self._groups.append(self._plan_group(plan, group, query_len))

    def serves(self, kv: LayerKV) -> bool:
        stride = self._block_pages * self._block_size * self._head_dim
        return kv.tail is None and kv.body.stride(0) == stride and kv.body.dtype == self._dtype

    def _pages(self, blocks: Tensor) -> Tensor:
        """Pages of blocks [..., M] -> [2, K, ..., M]."""
        parts = torch.arange(2 * self._num_kv_heads).view(2, self._num_kv_heads, *[1] * blocks.dim())
        return parts + blocks * self._block_pages

    def _rows(self, body: Tensor, tokens: int) -> Tensor:
        """A layer and what lies between its blocks as rows of `tokens` tokens each."""
        width, pages = tokens * self._head_dim, (len(body) - 1) * self._block_pages + 2 * self._num_kv_heads
        return body.as_strided((pages * self._block_size // tokens, width), (width, 1))

    def _plan_single(self, plan: AttentionPlan, s: int) -> _Single:
        kv_len, own = plan.kv_lens[s], slice(plan.query_starts[s], plan.query_starts[s + 1])
        blocks = plan.block_tables[s, : -(-kv_len // self._block_size)]
        mask = None
        if own.stop - own.start < kv_len:
            future = torch.arange(kv_len) > plan.positions(s)[:, None]
            mask = torch.zeros(future.shape, dtype=self._dtype).masked_fill_(future, -math.inf)
        return _Single(own, kv_len, self._pages(blocks).flatten(), mask)

    def _plan_group(self, plan: AttentionPlan, members: list[int], query_len: int) -> _Group:
        size = self._block_size
        kv_lens = torch.tensor([plan.kv_lens[s] for s in members])
        blocks = plan.block_tables[members, : -(-int(kv_lens.max()) // size)]  # [S, M]
        num_shared = self._num_shared_blocks(blocks, int(kv_lens.min()) - query_len)
        shared = self._pages(blocks[0, :num_shared]).flatten() if num_shared else None
        blocks = blocks[:, num_shared:]
        keys = torch.arange(blocks.shape[1] * size) + num_shared * size  # positions
        starts = torch.tensor([plan.query_starts[s] for s in members])
        own = (starts[:, None] + torch.arange(query_len)).flatten()
        positions = torch.stack([plan.positions(s) for s in members])  # [S, query_len]
        hidden = keys > positions[:, None, :, None]  # [S, 1, query_len, M B]
        unowned = (keys >= kv_lens[:, None]).expand(self._num_kv_heads, -1, -1).flatten().nonzero().flatten()
        return _Group(own, len(members), query_len, self._pages(blocks).flatten(), shared, hidden, unowned)

    def _num_shared_blocks(self, blocks: Tensor, num_past: int) -> int:
        """Leading blocks that all tables have in common and that lie before every query."""
        if len(blocks) < _MIN_SHARING_SEQS:
            return 0
        alike = int((blocks == blocks[:1]).all(0).long().cumprod(0).sum())
        num_shared = min(alike, num_past // self._block_size)
        return num_shared if num_shared >= _MIN_SHARED_BLOCKS else 0

    def write(self, kv: LayerKV, key: Tensor, value: Tensor) -> None:
        self._rows(kv.body, 1).index_put_((self._slots,), torch.cat((key, value), dim=1).to(self._dtype))

    def attend(self, rows: AttentionRows, kv: LayerKV) -> Tensor:
        q, pages = rows.query, self._rows(kv.body, self._block_size)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for single in self._singles:
            out[single.rows] = self._attend_single(pages, q[single.rows], single)
        for group in self._groups:
            out.index_copy_(0, group.rows, self._attend_group(pages, q.index_select(0, group.rows), group))
        return out

    def _gather(self, all_pages: Tensor, pages: Tensor, num: int) -> Tensor:
        """Keys and values [2, num, tokens, D]."""
        return all_pages.index_select(0, pages).view(2, num, -1, self._head_dim)

    def _attend_single(self, pages: Tensor, q: Tensor, single: _Single) -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        num_kv, group = self._num_kv_heads, num_heads // self._num_kv_heads
        k, v = self._gather(pages, single.pages, num_kv)[:, :, None, : single.kv_len].expand(-1, -1, group, -1, -1)
        queries = q.view(num_rows, num_kv, group, head_dim).permute(1, 2, 0, 3)  # [K, G, T, D]
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=single.mask, is_causal=single.mask is None)
        return out.permute(2, 0, 1, 3).reshape(q.shape)

    def _attend_group(self, pages: Tensor, q: Tensor, plan: _Group) -> Tensor:
        num_kv, num_seqs, query_len, head_dim = self._num_kv_heads, plan.num_seqs, plan.query_len, self._head_dim
        group = q.shape[1] // num_kv
        queries = q.view(num_seqs, query_len, num_kv, group, head_dim).permute(2, 0, 3, 1, 4) * self._scale
        queries = queries.reshape(num_kv * num_seqs, group * query_len, head_dim)
        k, v = self._gather(pages, plan.pages, num_kv * num_seqs)  # [K S, M B, D] each
        v.view(-1, head_dim).index_fill_(0, plan.unowned, 0)  # zero times NaN would be NaN
        scores = torch.bmm(queries, k.transpose(1, 2))  # [K S, G query_len, M B]
        scores.view(num_kv, num_seqs, group, query_len, -1).masked_fill_(plan.hidden, -math.inf)
        if plan.shared_pages is None:
            out = torch.bmm(scores.softmax(-1), v)
        else:
            shared_k, shared_v = self._gather(pages, plan.shared_pages, num_kv)  # [K, P B, D] each
            shared_scores = torch.bmm(queries.view(num_kv, -1, head_dim), shared_k.transpose(1, 2))
            num_shared = shared_k.shape[1]
            scores = torch.cat([shared_scores.view(*scores.shape[:2], num_shared), scores], -1).softmax(-1)
            out = torch.bmm(scores[..., num_shared:], v)
            shared_probs = scores[..., :num_shared].reshape(num_kv, -1, num_shared)
            out += torch.bmm(shared_probs, shared_v).view_as(out)
        out = out.view(num_kv, num_seqs, group, query_len, head_dim).permute(1, 3, 0, 2, 4)
        return out.reshape(q.shape)
