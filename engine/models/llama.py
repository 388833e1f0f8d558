"""Llama, and the decoders that differ from it by a bias or a norm: grouped-query attention, RMSNorm, SwiGLU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.inputs import ModelInputs
from engine.models.layers import Weights, rotary_tables, spec_from_config
from kernels.api import AttentionPlan, Kernels, Linear


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None


class LlamaForCausalLM:
    """Forward pass over a paged cache. Residual stream in float32, products in the compute dtype, logits in float32."""

    attention_bias = False
    qk_norm = False

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype, kernels: Kernels
    ) -> None:
        self.spec = spec_from_config(config, attention_bias=self.attention_bias, qk_norm=self.qk_norm)
        self._dtype, self._kernels = dtype, kernels
        weights, spec = Weights(tensors, dtype), self.spec
        self._embedding = weights.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self._layers = [self._layer(weights, index) for index in range(spec.num_layers)]
        self._norm = weights.take("model.norm.weight", spec.hidden_size)
        tied = spec.tie_word_embeddings
        head = self._embedding if tied else weights.take("lm_head.weight", spec.vocab_size, spec.hidden_size)
        self._head = kernels.pack_linear(head, None)
        self._cos, self._sin = rotary_tables(spec)

    def _layer(self, weights: Weights, index: int) -> _Layer:
        spec, prefix, pack = self.spec, f"model.layers.{index}", self._kernels.pack_linear
        query, kv, hidden = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
        attention = f"{prefix}.self_attn"
        parts = [(f"{attention}.q_proj", query), (f"{attention}.k_proj", kv), (f"{attention}.v_proj", kv)]
        bias = weights.fused([(f"{n}.bias", rows) for n, rows in parts]) if spec.attention_bias else None
        mlp = [(f"{prefix}.mlp.{n}_proj.weight", spec.intermediate_size) for n in ("gate", "up")]
        return _Layer(
            input_norm=weights.take(f"{prefix}.input_layernorm.weight", hidden),
            qkv=pack(weights.fused([(f"{n}.weight", rows) for n, rows in parts], hidden), bias),
            out=pack(weights.take(f"{attention}.o_proj.weight", hidden, query), None),
            post_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=pack(weights.fused(mlp, hidden), None),
            down=pack(weights.take(f"{prefix}.mlp.down_proj.weight", hidden, spec.intermediate_size), None),
            query_norm=weights.take(f"{attention}.q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            key_norm=weights.take(f"{attention}.k_norm.weight", spec.head_dim) if spec.qk_norm else None,
        )

    def new_cache(self, num_blocks: int, block_size: int) -> Tensor:
        """An empty KV cache [N, L, 2, K, B, D]."""
        spec = self.spec
        shape = (num_blocks, spec.num_layers, 2, spec.num_kv_heads, block_size, spec.head_dim)
        return torch.zeros(shape, dtype=self._dtype)

    def forward(self, inputs: ModelInputs, cache: Tensor) -> Tensor:
        """Logits [R, V] of the wanted rows; the cache gains the KV of all T tokens."""
        kernels, eps = self._kernels, self.spec.rms_norm_eps
        plan = _plan(inputs)
        cos, sin = self._cos[inputs.positions], self._sin[inputs.positions]
        residual = self._embedding[inputs.token_ids].float()
        delta = torch.zeros_like(residual)
        for index, layer in enumerate(self._layers):
            normed = kernels.add_rms_norm(residual, delta, layer.input_norm, eps)
            attended = self._attend(layer, index, normed, cache, plan, cos, sin)
            normed = kernels.add_rms_norm(residual, layer.out(attended), layer.post_norm, eps)
            delta = layer.down(kernels.silu_mul(layer.gate_up(normed)))
        last = residual[inputs.logit_rows]
        normed = kernels.add_rms_norm(last, delta[inputs.logit_rows], self._norm, eps)
        return self._head(normed).float()

    def _attend(
        self, layer: _Layer, index: int, x: Tensor, cache: Tensor, plan: AttentionPlan, cos: Tensor, sin: Tensor
    ) -> Tensor:
        spec, kernels = self.spec, self._kernels
        heads = layer.qkv(x).view(len(x), -1, spec.head_dim)  # [T, H + 2K, D]
        query, key, value = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = kernels.rms_norm(query, layer.query_norm, spec.rms_norm_eps)
            key = kernels.rms_norm(key, layer.key_norm, spec.rms_norm_eps)
        kernels.write_kv(kernels.rotary(key, cos, sin), value, cache, index, plan)
        return kernels.attention(kernels.rotary(query, cos, sin), cache, index, plan).flatten(1)


def _plan(inputs: ModelInputs) -> AttentionPlan:
    counts = torch.tensor([b - a for a, b in zip(inputs.query_starts, inputs.query_starts[1:], strict=False)])
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    blocks = inputs.block_tables[rows, inputs.positions // inputs.block_size]
    slots = blocks * inputs.block_size + inputs.positions % inputs.block_size
    return AttentionPlan(inputs.query_starts, inputs.kv_lens, inputs.block_tables, slots, inputs.block_size)
