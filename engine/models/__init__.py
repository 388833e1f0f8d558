"""Which architectures there are, and how one is loaded from a path. To add one: a file here and a line in MODELS."""

from pathlib import Path

from engine.checkpoint.gguf import read_gguf
from engine.checkpoint.safetensors import read_safetensors
from engine.device import return_freed_memory
from engine.errors import ModelLoadError
from engine.models.layers import Model
from engine.models.llama import LlamaForCausalLM
from engine.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM
from engine.models.weight_mode import DEFAULT_EXACT, ModeName, WeightMode
from kernels.api import Kernels
from kernels.select import select_kernels

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def load_model(
    path: str | Path, *, dtype: ModeName, exact_modules: tuple[str, ...] = DEFAULT_EXACT, kernels: Kernels | None = None
) -> Model:
    """A model from a safetensors directory or a GGUF file, in a `WeightMode`; raises ModelLoadError."""
    path = Path(path)
    config, tensors = read_gguf(path) if path.suffix == ".gguf" else read_safetensors(path)
    name = (config.get("architectures") or ["(none)"])[0]
    if name not in MODELS:
        raise ModelLoadError(f"architecture {name} is not supported, only {', '.join(MODELS)}")
    try:
        model = MODELS[name](config, tensors, WeightMode(dtype, exact_modules), kernels or select_kernels("cpu"))
    except ValueError as error:
        raise ModelLoadError(str(error)) from error
    return_freed_memory()
    return model
