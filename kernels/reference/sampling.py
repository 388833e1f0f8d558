"""Counter-based random numbers and the filters of sampling, vectorised over rows. Equal whatever the batch."""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10 (Salmon et al., SC'11): counter [R, 4] and key [R, 2], 32-bit words in int64; [R, 4] words."""
    c0, c1, c2, c3 = counter.unbind(1)
    k0, k1 = key.unbind(1)
    for _ in range(10):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=1)


def _multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product, without leaving int64's range."""
    low_half = (a & 0xFFFF) * constant
    high_half = (a >> 16) * constant
    low = low_half + ((high_half & 0xFFFF) << 16)
    return ((high_half >> 16) + (low >> 32)) & _MASK, low & _MASK


def uniform(seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """One float64 in [0, 1) per row: a function of (seed, choice, output position) and of nothing else."""
    key = torch.stack((seed & _MASK, (seed >> 32) & _MASK), dim=1)
    counter = torch.stack((position & _MASK, choice & _MASK, torch.zeros_like(seed), torch.zeros_like(seed)), dim=1)
    words = philox(counter, key)
    return ((words[:, 0] << 21) ^ (words[:, 1] >> 11)).double() / float(1 << 53)


def choose(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, random: Tensor) -> Tensor:
    """Token per row of [R, V]: filters in vLLM's order (min_p, top_k, top_p) after temperature, then inversion at
    `random`. `top_k` V is off; all parameters are [R]."""
    probabilities = (logits.double() / temperature[:, None]).softmax(-1)
    kept = probabilities >= min_p[:, None] * probabilities.amax(-1, keepdim=True)
    ordered, index = probabilities.masked_fill(~kept, 0.0).sort(dim=-1, descending=True, stable=True)
    ordered.masked_fill_(torch.arange(ordered.shape[1])[None] >= top_k[:, None], 0.0)
    ordered /= ordered.sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered
    ordered.masked_fill_((before >= top_p[:, None]) & (before > 0), 0.0)
    summed = ordered.cumsum(-1)
    place = torch.searchsorted(summed, (random * summed[:, -1])[:, None], right=True)
    last = (ordered > 0).sum(-1, keepdim=True) - 1
    chosen: Tensor = index.gather(1, torch.minimum(place, last))[:, 0]
    return chosen
