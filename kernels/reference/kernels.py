"""The reference kernel set: written to be read, in plain torch float32."""

from torch import Tensor

from kernels.api import AttentionPlan
from kernels.reference import attention, layers


class ReferenceKernels:
    """Every operation as its formula says; results are rounded to the compute dtype once, at the end."""

    name = "reference"

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> layers.ReferenceLinear:
        return layers.ReferenceLinear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return layers.rms_norm(x, weight, eps)

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return layers.rms_norm(residual.add_(delta), weight, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return layers.rotary(x, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return layers.silu_mul(gate_up)

    def write_kv(self, key: Tensor, value: Tensor, cache: Tensor, layer: int, plan: AttentionPlan) -> None:
        attention.write_kv(key, value, cache, layer, plan)

    def attention(self, query: Tensor, cache: Tensor, layer: int, plan: AttentionPlan) -> Tensor:
        return attention.attention(query, cache, layer, plan)
