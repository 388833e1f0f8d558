"""An engine on a model, by its path. Importing this imports no torch; `start` does."""

from pathlib import Path
from typing import Literal

from engine.config import EngineConfig
from engine.engine import Engine
from engine.loaded_model import LoadedModel


def load_engine(
    model_path: str | Path,
    config: EngineConfig,
    *,
    name: str | None = None,
    dtype: Literal["fp32", "bf16", "int8"] = "bf16",
    exact_modules: tuple[str, ...] = ("lm_head", "o_proj"),
    few_rows: bool = True,
    check: bool = False,
) -> Engine:
    """An engine for a safetensors directory or a GGUF file, in a `WeightMode`; `few_rows` is that of `select_kernels`.
    `start` does the loading."""

    def load() -> LoadedModel:
        from engine.loading import load_model_and_core

        return load_model_and_core(
            Path(model_path),
            config,
            name=name,
            dtype=dtype,
            exact_modules=exact_modules,
            few_rows=few_rows,
            check=check,
        )

    return Engine(load)
