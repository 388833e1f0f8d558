"""Choices of `kernels.reference.sampling` without sorting whole vocabularies, nor comparing their logits one by one.

A draw: the tokens that sampling can reach nearly always lie among the best thousand. A row is drawn from those when its
own logits, settings and random number say that the answer is the same, else from a full sort of that row alone.
"""

import torch
from torch import Tensor

from kernels.api import BestOutputs
from kernels.reference import sampling

NUM_CANDIDATES = 1024
PART_TOKENS = 256  # as fast as any from 128 to 1,024


def best_outputs(logits: Tensor) -> BestOutputs:
    """`greedy` and `finite_rows` of the same logits."""
    return BestOutputs(greedy(logits), finite_rows(logits))


def finite_rows(logits: Tensor) -> Tensor:
    """[R] bool: whether all logits [R, V] of a row are finite. A finite sum says so; finite logits may overflow it."""
    finite = logits.sum(dim=1).isfinite()
    unsure = (~finite).nonzero().flatten()
    if len(unsure):
        finite[unsure] = sampling.finite_rows(logits[unsure])
    return finite


def greedy(logits: Tensor) -> Tensor:
    """[R] token ids of the largest logits [R, V], the first of equal ones; a NaN counts as the largest.

    torch's argmax compares one value after another, its amax a vector of them: the maxima of the parts of the
    vocabulary tell which part has the token.
    """
    vocab_size = logits.shape[1]
    if vocab_size < PART_TOKENS:
        return sampling.greedy(logits)
    maxima = logits.unfold(1, PART_TOKENS, PART_TOKENS).amax(dim=2)
    if num_left := vocab_size % PART_TOKENS:
        maxima = torch.cat([maxima, logits[:, -num_left:].amax(dim=1, keepdim=True)], dim=1)
    # A short last part is searched together with logits before it: these are smaller, or their part had come first.
    starts = (maxima.argmax(dim=1) * PART_TOKENS).clamp(max=vocab_size - PART_TOKENS)
    part = logits.gather(1, starts[:, None] + torch.arange(PART_TOKENS))
    return starts + part.argmax(dim=1)


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """[R] token ids, as the reference draws them from logits [R, V]; settings [R]."""
    vocab_size = logits.shape[1]
    if vocab_size <= 2 * NUM_CANDIDATES:
        return sampling.draw(logits, temperature, top_k, top_p, min_p, uniform)
    values, ids = _candidates(logits)
    best = values[:, :1]
    weights = ((values - best) / temperature[:, None]).exp().double()  # relative to the best one
    keep = (torch.arange(NUM_CANDIDATES) < top_k[:, None]) & (weights >= min_p[:, None])
    kept = weights * keep
    totals = kept.cumsum(1)
    whole = torch.where(keep[:, -1], _reachable(logits, best, temperature, min_p), totals[:, -1])
    nucleus = keep & ((totals - kept) < (top_p * whole)[:, None])
    num_nucleus = nucleus.sum(1, keepdim=True).clamp(min=1)
    held = torch.where(nucleus[:, -1], whole, totals.gather(1, num_nucleus - 1).squeeze(1))
    index = (totals <= (uniform * held)[:, None]).sum(1, keepdim=True)
    # Where top_k cuts behind the candidates their whole weight is unknown, as is that of a nucleus that does not end
    # among them, unless it is everything. The last candidate may have equals outside, whose order would be unknown.
    known = (~keep[:, -1] | (top_k >= vocab_size)) & (~nucleus[:, -1] | (top_p >= 1))
    inside = index.squeeze(1) < NUM_CANDIDATES - 1
    index = torch.minimum(index, torch.where(nucleus[:, -1:], NUM_CANDIDATES - 1, num_nucleus - 1))
    apart = values.gather(1, index).squeeze(1) > values[:, -1]
    chosen = ids.gather(1, index).squeeze(1)
    rest = (~(known & inside & apart)).nonzero().flatten()
    if len(rest):
        settings = (column[rest] for column in (temperature, top_k, top_p, min_p, uniform))
        chosen[rest] = sampling.draw(logits[rest], *settings)
    return chosen


def _candidates(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best tokens, best first and equal ones by id."""
    ids = logits.topk(NUM_CANDIDATES, dim=1, sorted=False).indices.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _reachable(logits: Tensor, best: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """[R] weight of all tokens that min_p leaves, relative to the best one."""
    weights = ((logits - best) / temperature[:, None]).exp()
    return torch.where(weights >= min_p[:, None], weights, 0.0).sum(1, dtype=torch.float64)
