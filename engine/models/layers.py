"""What the model files share: the spec, the Protocol, weights by name, rotary angles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.cache.spec import CacheSpec, KVDtypeChoice
from engine.errors import ModelLoadError
from engine.inputs import ModelInputs
from engine.models.rotation import CheckpointRotation
from kernels.api import AttentionPlan, BestOutputs
from kernels.kv import LayerKV
from kernels.rows import Product


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder with grouped-query attention. Llama's cache has one group of paged layers."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    eos_token_ids: frozenset[int]
    kv_cache_dtype: str | tuple[str | None, ...] | None  # of the cache, or of its layers one by one


@dataclass(slots=True)
class ForwardPass:
    """A forward pass between two layers: the rows of a batch as the layers before `next_layer` left them."""

    inputs: ModelInputs
    plan: AttentionPlan
    residual: Tensor  # [T, E] float32
    delta: Product | None = None  # of the last layer, not yet added to the residual
    next_layer: int = 0


class LayerCache(Protocol):
    """The KV of all layers, as the model addresses it: blocks by the numbers in a step's block tables."""

    @property
    def layers(self) -> Sequence[LayerKV]: ...


class Model(Protocol):
    """`forward` is `begin`, `advance` to the last layer and `finish`; other passes may run between those calls."""

    spec: ModelSpec

    def cache_spec(self, block_size: int, kv_cache_dtype: KVDtypeChoice = "auto", group_size: int = 64) -> CacheSpec:
        """How the KV cache lies in memory. Raises ModelLoadError for a wrong `kv_cache_dtype` in the model's config."""

    def forward(self, inputs: ModelInputs, cache: LayerCache) -> Tensor:
        """Logits [R, V] of the wanted rows; the cache gains the KV of all T tokens."""

    def begin(self, inputs: ModelInputs) -> ForwardPass: ...

    def advance(self, state: ForwardPass, cache: LayerCache, last_layer: int) -> None: ...

    def finish(self, state: ForwardPass) -> Tensor: ...

    def choose(self, state: ForwardPass) -> BestOutputs:
        """As `finish`, when nothing but the best token of each row is wanted."""


class Weights:
    """Tensors of a checkpoint by name, checked for presence and shape as they are taken, and rotated where asked."""

    def __init__(self, tensors: Mapping[str, Tensor], rotation: CheckpointRotation | None = None) -> None:
        self._tensors = tensors
        self._rotation = rotation

    def take(self, name: str, *shape: int, stored_as: str | None = None) -> Tensor:
        """One tensor; `stored_as` is the name it has in the checkpoint if that is another (a tied head). Raises
        ModelLoadError that names it if missing or misshapen."""
        stored = stored_as or name
        if stored not in self._tensors:
            raise ModelLoadError(f"tensor {stored} is missing from the checkpoint")
        tensor = self._tensors[stored]
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"tensor {stored} has shape {list(tensor.shape)}, the configuration says {list(shape)}"
            )
        return self._rotation.apply(name, tensor) if self._rotation else tensor

    def fused(self, parts: list[tuple[str, int]], *tail: int) -> Tensor:
        """Several tensors one under the other: (name, rows) each, with a common tail shape."""
        return torch.cat([self.take(name, rows, *tail) for name, rows in parts])


def rotary_tables(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """cos and sin [max_model_len, D/2] in float32 (RoFormer, arXiv 2104.09864)."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    angles = torch.outer(torch.arange(spec.max_model_len, dtype=torch.float32), 1.0 / spec.rope_theta**exponents)
    return angles.cos(), angles.sin()


def spec_from_config(config: Mapping[str, Any], *, attention_bias: bool, qk_norm: bool) -> ModelSpec:
    """Read `config.json`; raises ModelLoadError naming what is missing or not supported."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelLoadError(f"RoPE scaling {kind!r} is not supported")
    if config.get("use_sliding_window"):
        raise ModelLoadError("sliding window attention is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"activation {config['hidden_act']!r} is not supported, only silu")
    if config.get("mlp_bias"):
        raise ModelLoadError("mlp_bias is not supported")
    if config.get("attention_bias") and not attention_bias:
        raise ModelLoadError("attention_bias (a bias on the output projection too) is not supported")
    try:
        heads = int(config["num_attention_heads"])
        eos, kv_dtype = config.get("eos_token_id"), config.get("kv_cache_dtype")
        eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        return ModelSpec(
            architecture=config["architectures"][0],
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            max_model_len=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=attention_bias,
            qk_norm=qk_norm,
            eos_token_ids=frozenset(int(token) for token in eos_ids),
            kv_cache_dtype=tuple(kv_dtype) if isinstance(kv_dtype, list) else kv_dtype,
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelLoadError(f"config.json: {type(error).__name__} on {error}") from error
