"""A linear that also keeps its weight as it lies in memory, [out, in], for steps of one or two rows.

oneDNN's packed layout is made for tiles of rows: over one row of int8 it reads the weight far more slowly than the
memory gives it. The second layout costs the weight's bytes once more.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.cpu.int8 import Int8Linear
from kernels.cpu.native.ops import NativeOps
from kernels.rows import Product, RowFormat, Rows

MAX_ROWS = 2  # from three rows on the packed layout is as fast


@dataclass(frozen=True, slots=True)
class FewRowsInt8Linear:
    """Equal to `packed` in every sum, whichever serves: both add exact integers."""

    packed: Int8Linear
    codes: Tensor  # [out, in] int8
    ops: NativeOps

    @property
    def row_format(self) -> RowFormat:
        return self.packed.row_format

    def __call__(self, rows: Rows) -> Product:
        rows = self.packed.rounded(rows)
        if len(rows.values) > MAX_ROWS:
            return self.packed(rows)
        product = self.ops.matvec(rows.values, self.codes, self.packed.scales, rows.scales)
        return product if self.packed.bias is None else product + self.packed.bias
