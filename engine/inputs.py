"""What a model runs in one step: plain tensors and lists, the same for every rank of a parallel model."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class ModelInputs:
    """T new tokens of S sequences. Rows of sequence s are query_starts[s]:query_starts[s + 1].

    `tail_slots[s]` is where sequence s keeps the block in which it is now writing, in compute dtype. A layer whose body
    is stored in compute dtype too does not read it: there a body block is its own tail.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_starts: list[int]  # S + 1
    kv_lens: list[int]  # S, length with the new tokens included
    block_tables: Tensor  # [S, M] int64, padded with 0
    tail_slots: list[int]  # S
    logit_rows: Tensor  # [R] int64, rows of T whose logits are wanted
    block_size: int
