"""The KV cache of one layer, and its rows. Shape letters as in `kernels.api`; C channel groups of a head."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Full blocks as they are stored, and for a form other than the compute dtype the blocks that are being written.

    A query reads its own block in compute dtype and every earlier block as stored, whatever the step: what is read is a
    function of the tokens alone. Without a tail the body holds the compute dtype, so that a body block is its own tail.
    """

    body: Tensor  # [N, 2, K, B, D]; a block is contiguous, blocks may lie apart
    scales: Tensor | None = None  # [N, 2, K, B, C] float16, of int8 codes
    tail: Tensor | None = None  # [tail slots, 2, K, B - 1, D] in compute dtype: the last row of a block never waits
    group_size: int = 64  # channels of one scale

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.body.dtype if self.tail is None else self.tail.dtype


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The rotated rows of a step. `exact` holds, where the layer has a tail, keys and values in compute dtype of each
    sequence from the start of the block of its first row on, one sequence after the other."""

    query: Tensor  # [T, H, D]
    exact: Tensor | None = None  # [X, 2, K, D]
