"""A decoder with random weights for what is about the disk and not about arithmetic."""

import json
from pathlib import Path

HIDDEN, LAYERS, HEADS, HEAD_DIM, INNER, VOCABULARY = 256, 5, 4, 64, 512, 4096


def write_checkpoint(directory: Path) -> Path:
    """A Llama checkpoint of 4.3 million weights; a block of 16 tokens in bf16 is 81,920 bytes."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    attention = HEADS * HEAD_DIM
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (attention, HIDDEN) for part in "qkv"}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
        shapes |= {
            f"{name}.self_attn.o_proj.weight": (HIDDEN, attention),
            f"{name}.mlp.down_proj.weight": (HIDDEN, INNER),
            f"{name}.input_layernorm.weight": (HIDDEN,),
            f"{name}.post_attention_layernorm.weight": (HIDDEN,),
        }
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory
