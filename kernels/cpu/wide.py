"""A bfloat16 linear with float32 products, over the weight as it lies in memory: what gives the logits of a tied head,
and of any where there is no tile unit.

Rounded to eight bits the best tokens of a row often tie, and the choice between them is no longer the model's.
"""

from dataclasses import dataclass

from torch import Tensor

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

    def can_choose(self, num_rows: int) -> bool:
        """Whether `best` gives what the outputs of so many rows would: a few are summed in another order."""
        return num_rows > MAX_ROWS

    def best(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """As `NativeOps.wide_best`."""
        assert isinstance(rows, Tensor)
        return self.ops.wide_best(rows, self.weight)
