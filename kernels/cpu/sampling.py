"""The draw of `kernels.reference.sampling` without sorting whole vocabularies.

The tokens that sampling can reach nearly always lie among the best thousand. A row is drawn from those when its own
logits, settings and random number say that the answer is the same, else from a full sort of that row alone.
"""

import torch
from torch import Tensor

from kernels.reference import sampling

NUM_CANDIDATES = 1024


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
