"""Which architectures there are, and how one is loaded from a path. To add one: a file here and a line in MODELS."""

from pathlib import Path

import torch

from engine.checkpoint.gguf import read_gguf
from engine.checkpoint.safetensors import read_safetensors
from engine.errors import ModelLoadError
from engine.models.layers import Model
from engine.models.llama import LlamaForCausalLM
from engine.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM
from kernels.api import Kernels
from kernels.select import select_kernels

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_model(path: str | Path, *, dtype: str, kernels: Kernels | None = None) -> Model:
    """A model from a safetensors directory or a GGUF file; raises ModelLoadError."""
    path = Path(path)
    config, tensors = read_gguf(path) if path.suffix == ".gguf" else read_safetensors(path)
    name = (config.get("architectures") or ["(none)"])[0]
    if name not in MODELS:
        raise ModelLoadError(f"architecture {name} is not supported, only {', '.join(MODELS)}")
    return MODELS[name](config, tensors, DTYPES[dtype], kernels or select_kernels("cpu"))
