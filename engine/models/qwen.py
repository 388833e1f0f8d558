"""Qwen2 (biases on q, k and v) and Qwen3 (a norm on every head of q and k)."""

from engine.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    attention_bias = True


class Qwen3ForCausalLM(LlamaForCausalLM):
    qk_norm = True
