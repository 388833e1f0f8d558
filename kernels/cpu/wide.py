"""A bfloat16 linear with float32 products, over the weight as it lies in memory: what gives the logits of a tied head,
and of any where there are no tiles.

Rounded to eight bits the best tokens of a row often tie, and the choice between them is no longer the model's.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.api import BestOutputs
from kernels.cpu.native.ops import NativeOps
from kernels.rows import RowFormat, Rows

MAX_ROWS = 2  # up to which one pass over the weight in lanes beats blocks of it


@dataclass(frozen=True, slots=True)
class WideLinear:
    """Keeps the given weight [out, in] and no copy of it: a tied head costs no memory."""

    weight: Tensor
    ops: NativeOps
    row_format: RowFormat = RowFormat.BF16

    def __call__(self, rows: Rows) -> Tensor:
        assert isinstance(rows, Tensor), "a dense linear takes dense rows"
        if len(rows) <= MAX_ROWS:
            return self.ops.matvec(rows, self.weight)
        return self.ops.wide_linear(rows, self.weight)

    def best(self, rows: Rows) -> BestOutputs | None:
        """As that of `TileLinear`: the outputs of a few rows are summed in another order."""
        assert isinstance(rows, Tensor), "a dense linear takes dense rows"
        return BestOutputs(*self.ops.wide_best(rows, self.weight)) if len(rows) > MAX_ROWS else None
