"""Llama, and the decoders that differ from it by a bias or a norm: grouped-query attention, RMSNorm, SwiGLU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.cache.spec import CacheSpec, KVDtype, KVDtypeChoice, layer_dtypes
from engine.errors import ModelLoadError
from engine.inputs import ModelInputs
from engine.models.layers import ForwardPass, LayerCache, Weights, rotary_tables, spec_from_config
from engine.models.rotation import CheckpointRotation
from engine.models.weight_mode import WeightMode
from kernels.api import AttentionPlan, BestOutputs, HeadNorms, Kernels, Linear
from kernels.rows import Rows, dense


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaForCausalLM:
    """Forward pass over a paged cache. Residual stream in float32, products in the weight mode, logits in float32."""

    attention_bias = False
    qk_norm = False

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], mode: WeightMode, kernels: Kernels
    ) -> None:
        self.spec = spec_from_config(config, attention_bias=self.attention_bias, qk_norm=self.qk_norm)
        self._mode, self._kernels, self._modules = mode, kernels, set[str]()
        spec = self.spec
        rotation = None
        if mode.is_rotated:
            rotation = CheckpointRotation(tensors, spec.hidden_size, spec.head_dim, mode.rotation_seed)
        weights, embedding = Weights(tensors, rotation), "model.embed_tokens.weight"
        self._embedding = weights.take(embedding, spec.vocab_size, spec.hidden_size).to(mode.dtype)
        norm = weights.take("model.norm.weight", spec.hidden_size)
        head = self._embedding  # tied, and the very tensor unless a rotation turns the two in different ways
        if rotation or not spec.tie_word_embeddings:
            stored_as = embedding if spec.tie_word_embeddings else None
            head = weights.take("lm_head.weight", spec.vocab_size, spec.hidden_size, stored_as=stored_as)
        # before the layers: what it takes to rotate and pack a head would come on top of all of them
        self._head = self._linear("lm_head", head, None, wide=True, tied=head is self._embedding)
        del head
        self._layers = [self._layer(weights, index) for index in range(spec.num_layers)]
        self._norm = norm.to(self._head.row_format.dtype)
        self._cos, self._sin = rotary_tables(spec)
        mode.check_modules(self._modules)

    def _linear(
        self, module: str, weight: Tensor, bias: Tensor | None = None, *, wide: bool = False, tied: bool = False
    ) -> Linear:
        self._modules.add(module)
        row_format = self._mode.row_format(module, weight.shape[1])
        return self._kernels.pack_linear(weight, bias, row_format, wide=wide, tied=tied)

    def _layer(self, weights: Weights, index: int) -> _Layer:
        spec, prefix = self.spec, f"model.layers.{index}"
        query, kv, hidden = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        input_norm = weights.take(f"{prefix}.input_layernorm.weight", hidden)
        parts = [(f"{attention}.q_proj", query), (f"{attention}.k_proj", kv), (f"{attention}.v_proj", kv)]
        bias = weights.fused([(f"{n}.bias", rows) for n, rows in parts]) if spec.attention_bias else None
        qkv = self._linear(
            f"{attention}.qkv_proj", weights.fused([(f"{n}.weight", rows) for n, rows in parts], hidden), bias
        )
        norms = None
        if spec.qk_norm:
            query_norm, key_norm = (weights.take(f"{attention}.{n}_norm.weight", spec.head_dim) for n in "qk")
            norms = HeadNorms(query_norm.to(self._mode.dtype), key_norm.to(self._mode.dtype), spec.rms_norm_eps)
        post_norm = weights.take(f"{prefix}.post_attention_layernorm.weight", hidden)
        gates = [(f"{mlp}.{n}_proj.weight", spec.intermediate_size) for n in ("gate", "up")]
        gate_up = self._linear(f"{mlp}.gate_up_proj", weights.fused(gates, hidden))
        return _Layer(
            input_norm=input_norm.to(qkv.row_format.dtype),
            qkv=qkv,
            head_norms=norms,
            out=self._linear(f"{attention}.o_proj", weights.take(f"{attention}.o_proj.weight", hidden, query)),
            post_norm=post_norm.to(gate_up.row_format.dtype),
            gate_up=gate_up,
            down=self._linear(
                f"{mlp}.down_proj", weights.take(f"{mlp}.down_proj.weight", hidden, spec.intermediate_size)
            ),
        )

    def cache_spec(self, block_size: int, kv_cache_dtype: KVDtypeChoice = "auto", group_size: int = 64) -> CacheSpec:
        spec = self.spec
        compute: KVDtype = "bf16" if self._mode.dtype is torch.bfloat16 else "fp32"
        try:
            dtypes = layer_dtypes(kv_cache_dtype, spec.kv_cache_dtype, compute, spec.num_layers)
        except ValueError as error:
            raise ModelLoadError(str(error)) from error
        return CacheSpec(dtypes, compute, spec.num_kv_heads, spec.head_dim, block_size, group_size)

    def forward(self, inputs: ModelInputs, cache: LayerCache) -> Tensor:
        """Logits [R, V] of the wanted rows; the cache gains the KV of all T tokens."""
        state = self.begin(inputs)
        self.advance(state, cache, self.spec.num_layers)
        return self.finish(state)

    def begin(self, inputs: ModelInputs) -> ForwardPass:
        """A pass in front of the first layer."""
        return ForwardPass(inputs, self._plan(inputs), self._embedding[inputs.token_ids].float())

    def advance(self, state: ForwardPass, cache: LayerCache, last_layer: int) -> None:
        """Run the layers that are left before `last_layer`; the cache gains their KV of all T tokens."""
        kernels, eps, plan, residual = self._kernels, self.spec.rms_norm_eps, state.plan, state.residual
        for index in range(state.next_layer, last_layer):
            layer, kv = self._layers[index], cache.layers[index]
            rows = kernels.add_rms_norm(residual, state.delta, layer.input_norm, eps, layer.qkv.row_format)
            rotated = kernels.rotary_write_kv(layer.qkv(rows), layer.head_norms, kv, plan)
            attended = kernels.attention(rotated, kv, plan).flatten(1)
            rows = kernels.add_rms_norm(residual, layer.out(attended), layer.post_norm, eps, layer.gate_up.row_format)
            state.delta = kernels.feed_forward(rows, layer.gate_up, layer.down)
        state.next_layer = last_layer

    def finish(self, state: ForwardPass) -> Tensor:
        """Logits [R, V] of the wanted rows, once the last layer has run."""
        return dense(self._head(self._wanted_rows(state))).float()

    def choose(self, state: ForwardPass) -> BestOutputs:
        return self._kernels.best_outputs(self._wanted_rows(state), self._head)

    def _wanted_rows(self, state: ForwardPass) -> Rows:
        wanted = state.inputs.logit_rows
        last = None if state.delta is None else state.delta[wanted]
        return self._kernels.add_rms_norm(
            state.residual[wanted], last, self._norm, self.spec.rms_norm_eps, self._head.row_format
        )

    def _plan(self, inputs: ModelInputs) -> AttentionPlan:
        counts = torch.tensor([b - a for a, b in zip(inputs.query_starts, inputs.query_starts[1:], strict=False)])
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        blocks = inputs.block_tables[rows, inputs.positions // inputs.block_size]
        return AttentionPlan(
            query_starts=inputs.query_starts,
            kv_lens=inputs.kv_lens,
            block_tables=inputs.block_tables,
            slots=blocks * inputs.block_size + inputs.positions % inputs.block_size,
            block_size=inputs.block_size,
            cos=self._cos[inputs.positions],
            sin=self._sin[inputs.positions],
            tail_slots=inputs.tail_slots,
        )
