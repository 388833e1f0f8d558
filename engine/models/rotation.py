"""Rotates a checkpoint so that no channel of a row stands out, which is what int8 rows lose most by.

The function of the model stays the same (QuaRot, arXiv 2404.00456; SpinQuant, 2405.16406): the weight of each RMSNorm
is folded into the linears behind it, the residual stream is multiplied by one orthogonal matrix, and V by a Hadamard
matrix that the output projection undoes. All of it is in the weights, nothing is left to do at run time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.quant import hadamard_matrix

ROTATION_VERSION = 1  # part of a model's digest: a change here changes what the cached KV means
_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
_NORM_OF = {reader: norm for norm, readers in _READERS.items() for reader in readers}
_ROWS_AT_A_TIME = 4096
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class Rotation:
    """An orthogonal matrix of `size` columns: random signs, then a random rotation of the odd factor by a Hadamard of
    the largest power of two. Never made dense."""

    signs: Tensor  # [size]
    outer: Tensor  # [odd, odd]
    inner: Tensor  # [2^k, 2^k]

    @classmethod
    def random(cls, size: int, seed: int) -> "Rotation":
        generator = torch.Generator().manual_seed(seed)
        power = size & -size
        odd = size // power
        q, r = torch.linalg.qr(torch.randn(odd, odd, dtype=torch.float64, generator=generator))
        signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
        return cls(signs.float(), (q * r.diagonal().sign()).float(), hadamard_matrix(power))

    def rows(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """x [R, size], its columns times `weight`, times the matrix. Some rows at a time: an embedding is large."""
        factors = self.signs if weight is None else self.signs * weight
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for start in range(0, len(x), _ROWS_AT_A_TIME):
            part = x[start : start + _ROWS_AT_A_TIME] * factors
            halves = part.view(len(part), len(self.outer), len(self.inner))
            out[start : start + len(part)] = torch.matmul(self.outer.T @ halves, self.inner).flatten(-2)
        return out


class CheckpointRotation:
    """Rotates the tensors of a checkpoint one by one, by name."""

    def __init__(self, tensors: Mapping[str, Tensor], hidden_size: int, head_dim: int, seed: int) -> None:
        self._tensors = tensors
        self._residual = Rotation.random(hidden_size, seed)
        self._value = hadamard_matrix(head_dim & -head_dim)

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """The rotated tensor in float32. The norm in front of a linear must have the hidden size."""
        tensor = tensor.float()
        if name == "model.embed_tokens.weight":
            return self._residual.rows(tensor)
        if name == "lm_head.weight":
            return self._residual.rows(tensor, self._tensors["model.norm.weight"].float())
        module, _, part = name.rpartition(".")
        layer, module = ".".join(module.split(".")[:3]), ".".join(module.split(".")[3:])
        if name == "model.norm.weight" or module in _READERS:
            return torch.ones_like(tensor)
        if module == "self_attn.v_proj":
            tensor = self._heads(tensor.T).T if part == "weight" else self._heads(tensor)
        if part != "weight":
            return tensor
        if module == "self_attn.o_proj":
            tensor = self._heads(tensor)
        if module in _NORM_OF:
            return self._residual.rows(tensor, self._tensors[f"{layer}.{_NORM_OF[module]}.weight"].float())
        return self._residual.rows(tensor.T).T if module in _WRITERS else tensor

    def _heads(self, x: Tensor) -> Tensor:
        """Each head's values [..., K D] times the Hadamard, which is its own inverse."""
        return torch.matmul(x.reshape(*x.shape[:-1], -1, len(self._value)), self._value).flatten(-2)
