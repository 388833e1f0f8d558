"""The feed-forward part of a layer, computed some rows at a time."""

import pytest
import torch

from kernels.cpu.feed_forward import ROWS_AT_ONCE
from kernels.cpu.int8 import can_multiply_int8
from kernels.reference.quant import to_rows
from kernels.rows import RowFormat, dense
from kernels.select import KERNELS, select_kernels

FORMATS = [
    (RowFormat.FP32, RowFormat.FP32),
    (RowFormat.BF16, RowFormat.BF16),
    *([(RowFormat.INT8, RowFormat.ROTATED_INT8)] if can_multiply_int8() else []),
]


@pytest.mark.parametrize("name", sorted(set(KERNELS) - {"reference"}))
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("num_rows", [1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 2 * ROWS_AT_ONCE + 77])
@torch.inference_mode()
def test_rows_in_pieces_are_those_of_one_piece(
    name: str, formats: tuple[RowFormat, RowFormat], num_rows: int, request: pytest.FixtureRequest
) -> None:
    """In their order, none missing, for numbers that fill no piece."""
    if name == "cpu-native":
        request.getfixturevalue("ops")
    torch.manual_seed(0)
    kernels = select_kernels("cpu", prefer=name)
    gate_up_weight = torch.randn(128, 64) / 8
    gate_up = kernels.pack_linear(gate_up_weight, None, formats[0])
    unrounded = kernels.pack_linear(gate_up_weight, None, formats[0], wide=True)  # as products beside their gate are
    down = kernels.pack_linear(torch.randn(64, 64) / 8, None, formats[1])
    rows = to_rows(torch.randn(num_rows, 64), formats[0])
    at_once = dense(down(kernels.silu_mul(unrounded(rows), formats[1])))
    torch.testing.assert_close(
        dense(kernels.feed_forward(rows, gate_up, down)).float(), at_once.float(), rtol=2e-2, atol=2e-2
    )
