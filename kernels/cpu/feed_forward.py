"""The feed-forward part of a layer, some rows at a time: what lies between its linears then stays in the cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.rows import Product, Rows, ScaledRows, joined

ROWS_AT_ONCE = 256  # of SmolLM2 0.8 MB of bfloat16 between the linears


def in_pieces(product: Callable[[Rows], Product], rows: Rows) -> Product:
    """The product of all rows, row by row the same as at once up to the rounding of the linears."""
    if len(rows) <= ROWS_AT_ONCE:
        return product(rows)
    return joined([product(rows[piece]) for piece in _pieces(len(rows))])


def filled_in_pieces(product: Callable[[Rows, Tensor], Product], rows: Rows, room: Tensor) -> Product:
    """The same where a product fills its rows of `room` [T, out], so that none are copied."""
    if len(rows) <= ROWS_AT_ONCE:
        return product(rows, room)
    parts = [product(rows[piece], room[piece]) for piece in _pieces(len(rows))]
    scales = [part.scales for part in parts if isinstance(part, ScaledRows)]
    return ScaledRows(room, torch.cat(scales)) if scales else room


def _pieces(num_rows: int) -> list[slice]:
    return [slice(first, first + ROWS_AT_ONCE) for first in range(0, num_rows, ROWS_AT_ONCE)]
