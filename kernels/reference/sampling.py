"""Choosing tokens from logits, in plain torch. Every row is computed by itself: batch mates never change a choice.

Shapes: R rows, V vocabulary.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10: counter [R, 4] and key [R, 2] to [R, 4], all 32-bit words in int64.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    c0, c1, c2, c3 = counter.unbind(1)
    k0, k1 = key.unbind(1)
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 64-bit products, their sign bit is a bit like others
        c0, c1, c2, c3 = (p1 >> 32) & _MASK ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) & _MASK ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=1)


def uniform(seeds: list[int], choices: list[int], positions: list[int]) -> Tensor:
    """[R] float64 in [0, 1) with 53 bits: a function of (seed mod 2**64, choice, output position) alone."""
    key = torch.tensor([[seed & _MASK, (seed >> 32) & _MASK] for seed in seeds], dtype=torch.int64)
    counter = torch.zeros(len(seeds), 4, dtype=torch.int64)
    counter[:, 0], counter[:, 1] = torch.tensor(positions), torch.tensor(choices)
    high, low = philox(counter, key)[:, :2].unbind(1)
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def token_counts(token_ids: list[list[int]], vocab_size: int) -> Tensor:
    """[R, V] float32: how often each token is in each list."""
    counts = torch.zeros(len(token_ids), vocab_size)
    rows = torch.repeat_interleave(torch.arange(len(token_ids)), torch.tensor([len(ids) for ids in token_ids]))
    columns = torch.tensor([token for ids in token_ids for token in ids], dtype=torch.int64)
    return counts.index_put_((rows, columns), torch.ones(len(columns)), accumulate=True)


def penalise(
    logits: Tensor,
    prompt_counts: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """[R, V] with penalties [R]: repetition over prompt and output, frequency and presence over the output."""
    seen = (prompt_counts + output_counts) > 0
    factor = repetition[:, None].expand_as(logits)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    penalised = torch.where(seen, repeated, logits)
    return penalised - frequency[:, None] * output_counts - presence[:, None] * (output_counts > 0)


def finite_rows(logits: Tensor) -> Tensor:
    """[R] bool: whether all logits [R, V] of a row are finite."""
    return logits.isfinite().all(dim=1)


def greedy(logits: Tensor) -> Tensor:
    """[R] token ids of the largest logits [R, V], the first of equal ones; a NaN counts as the largest."""
    return logits.argmax(dim=1)


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """[R] token ids by inversion over the tokens sorted by falling probability (equal ones by id).

    Per row: temperature (> 0), then at most `top_k` (int64) tokens of at least `min_p` times the best probability, then
    the fewest of them that hold `top_p` of what remains.
    """
    ordered, ids = logits.sort(dim=1, descending=True, stable=True)
    scaled = (ordered - ordered[:, :1]) / temperature[:, None]
    weights = scaled.softmax(dim=1).double()
    keep = (torch.arange(logits.shape[1]) < top_k[:, None]) & (weights >= min_p[:, None] * weights[:, :1])
    weights = weights * keep
    totals = weights.cumsum(dim=1)
    keep &= (totals - weights) < top_p[:, None] * totals[:, -1:]
    num_kept = keep.sum(dim=1, keepdim=True).clamp(min=1)
    target = uniform[:, None] * totals.gather(1, num_kept - 1)
    index = (totals <= target).sum(dim=1, keepdim=True)
    return ids.gather(1, torch.minimum(index, num_kept - 1)).squeeze(1)
