"""In what precision each linear of a model is kept."""

from dataclasses import dataclass
from typing import Literal

import torch

from engine.errors import ModelLoadError
from engine.models.rotation import ROTATION_VERSION
from kernels.rows import HADAMARD_BLOCK, RowFormat

ModeName = Literal["fp32", "bf16", "int8"]
MODES: tuple[ModeName, ...] = ("fp32", "bf16", "int8")
# What costs most for its size: without these two an answer of SmolLM2 on W2 is that of float32 greedy for 0.37 of its
# length, with them for 0.50.
DEFAULT_EXACT = ("lm_head", "o_proj")
_DENSE = {"fp32": RowFormat.FP32, "bf16": RowFormat.BF16, "int8": RowFormat.BF16}


@dataclass(frozen=True, slots=True)
class WeightMode:
    """`fp32` is exact, `bf16` the default; `int8` rounds weights by output channel and rows one by one, rotated.

    `exact_modules` stay bf16 in int8: the start of a module's name, such as `lm_head`, `model.layers.0` or
    `model.layers.3.mlp.down_proj`, or its last part, such as `o_proj` for that of every layer (the fused ones are
    `qkv_proj` and `gate_up_proj`). They mean nothing in the other modes.
    """

    name: ModeName = "bf16"
    exact_modules: tuple[str, ...] = DEFAULT_EXACT
    rotation_seed: int = 3  # of 0 to 3 the one that costs SmolLM2 least

    def __post_init__(self) -> None:
        if self.name not in MODES:
            raise ModelLoadError(f"the weight mode must be one of {', '.join(MODES)}, got {self.name}")

    @property
    def is_rotated(self) -> bool:
        return self.name == "int8"

    @property
    def dense(self) -> RowFormat:
        """Of the embedding, the KV cache and the modules that are kept exact."""
        return _DENSE[self.name]

    @property
    def dtype(self) -> torch.dtype:
        return self.dense.dtype

    @property
    def digest(self) -> str:
        """What of the mode changes the meaning of cached keys and values."""
        if self.name != "int8":
            return self.name
        return f"int8/rotation={ROTATION_VERSION}.{self.rotation_seed}/exact={','.join(sorted(self.exact_modules))}"

    def row_format(self, module: str, num_columns: int) -> RowFormat:
        """Of the linear with this name. Rows of down_proj have the largest outliers: they are rotated at run time."""
        if self.name != "int8" or any(_is_part_of(module, exact) for exact in self.exact_modules):
            return self.dense
        if module.endswith("down_proj") and num_columns % HADAMARD_BLOCK == 0:
            return RowFormat.ROTATED_INT8
        return RowFormat.INT8

    def check_modules(self, modules: set[str]) -> None:
        """Raise ModelLoadError for an exact module that the model does not have."""
        for exact in self.exact_modules:
            if self.name == "int8" and not any(_is_part_of(module, exact) for module in modules):
                raise ModelLoadError(f"the model has no module {exact} to keep exact")


def _is_part_of(module: str, exact: str) -> bool:
    return module == exact or module.startswith(f"{exact}.") or module.endswith(f".{exact}")
