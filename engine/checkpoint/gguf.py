"""Reads a GGUF file: metadata as a Hugging Face configuration, tensors dequantised and renamed."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from torch import Tensor

from engine.checkpoint.gguf_file import open_gguf
from engine.errors import ModelLoadError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufTensors(Mapping[str, Tensor]):
    """Tensors in float32 by Hugging Face's names, dequantised as they are asked for: never all in memory at once."""

    def __init__(self, reader: gguf.GGUFReader, config: dict[str, Any]) -> None:
        named = ((_name(tensor.name), tensor) for tensor in reader.tensors)
        self._tensors = {name: tensor for name, tensor in named if name is not None}
        self._config = config

    def __getitem__(self, name: str) -> Tensor:
        stored = self._tensors[name]
        try:
            # numpy.array copies: an unquantised tensor would be a view of the read-only file
            values = numpy.array(gguf.quants.dequantize(stored.data, stored.tensor_type))
        except (ValueError, NotImplementedError) as error:  # a row of no whole blocks; a kind that gguf cannot unpack
            raise ModelLoadError(f"tensor {name} is damaged or of an unknown kind: {error}") from error
        return _unpermuted(name, torch.from_numpy(values).float(), self._config)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def read_gguf(path: Path) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Configuration and tensors in float32; raises ModelLoadError naming what is missing or damaged."""
    reader, fields = open_gguf(path)
    try:
        config = _config(fields)
    except KeyError as error:  # _config looks up nothing but metadata by name
        raise ModelLoadError(f"{path} has no metadata {error}") from error
    tensors = GgufTensors(reader, config)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    return config, tensors


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    kind = fields["general.architecture"]
    if kind not in _ARCHITECTURES:
        raise ModelLoadError(f"GGUF architecture {kind!r} is not supported, only {', '.join(_ARCHITECTURES)}")
    heads, hidden = fields[f"{kind}.attention.head_count"], fields[f"{kind}.embedding_length"]
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "num_hidden_layers": fields[f"{kind}.block_count"],
        "hidden_size": hidden,
        "intermediate_size": fields[f"{kind}.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get(f"{kind}.attention.head_count_kv", heads),
        "head_dim": fields.get(f"{kind}.attention.key_length", hidden // heads),
        "vocab_size": fields.get(f"{kind}.vocab_size", len(fields["tokenizer.ggml.tokens"])),
        "max_position_embeddings": fields[f"{kind}.context_length"],
        "rms_norm_eps": fields[f"{kind}.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields.get(f"{kind}.rope.freq_base", 10_000.0),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }


def _name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor; None for tables that are derived (rope_freqs)."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    if name.startswith("rope_freqs"):
        raise ModelLoadError("RoPE frequency factors are not supported")
    return None


def _unpermuted(name: str, weight: Tensor, config: dict[str, Any]) -> Tensor:
    """Undo the interleaving of rotary halves that llama.cpp's converter applies to q and k of Llama alone."""
    heads = {"q_proj.weight": "num_attention_heads", "k_proj.weight": "num_key_value_heads"}
    key = next((value for suffix, value in heads.items() if name.endswith(suffix)), None)
    if key is None or config["architectures"] != ["LlamaForCausalLM"]:
        return weight
    count = config[key]
    halves = weight.view(count, weight.shape[0] // count // 2, 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)
