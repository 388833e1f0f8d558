"""Shapes and dtypes of the native operations' results, for who traces a model; `opcheck` proves that they are right.
Register once, after the library is loaded."""

import torch
from torch import Tensor


def _int8_rows(x: Tensor, width: int | torch.SymInt) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[0], width), dtype=torch.uint8), x.new_empty(x.shape[:1], dtype=torch.float32)


def add_rms_norm(
    residual: Tensor, delta: Tensor | None, delta_scales: Tensor | None, weight: Tensor, eps: float
) -> Tensor:
    return weight.new_empty(residual.shape)


def add_rms_norm_int8(
    residual: Tensor, delta: Tensor | None, delta_scales: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return _int8_rows(residual, residual.shape[1])


def silu_mul(gate_up: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=dtype)


def quantise_rows(x: Tensor, hadamard: int = 0) -> tuple[Tensor, Tensor]:
    return _int8_rows(x, x.shape[1])


def rotary_write_kv(
    qkv: Tensor,
    scales: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    body: Tensor,
    num_heads: int,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> Tensor:
    return body.new_empty((qkv.shape[0], num_heads, body.shape[4]))


def attention(
    query: Tensor,
    body: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    shared_groups: Tensor,
    exact: Tensor | None = None,
    body_scales: Tensor | None = None,
    group_size: int = 64,
) -> Tensor:
    return torch.empty_like(query)


def stored_rotary_write(
    qkv: Tensor,
    scales: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    tail_slots: Tensor,
    body: Tensor,
    body_scales: Tensor | None,
    tail: Tensor,
    group_size: int,
    num_heads: int,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    num_exact = torch.library.get_ctx().new_dynamic_size()  # known once lengths are
    heads, dim = body.shape[2], body.shape[4]
    return tail.new_empty((qkv.shape[0], num_heads, dim)), tail.new_empty((num_exact, 2, heads, dim))


def matvec(x: Tensor, weight: Tensor, weight_scales: Tensor | None, x_scales: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


def wide_best(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _best(x)


def tile_best(x: Tensor, packed: Tensor, num_outputs: int) -> tuple[Tensor, Tensor]:
    return _best(x)


def tile_pack(weight: Tensor) -> Tensor:
    strips, steps = -(-weight.shape[0] // 32), -(-weight.shape[1] * weight.itemsize // 64)
    return weight.new_empty((strips, steps, 2, 1024 // weight.itemsize))


def tile_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
    return None


def tile_linear_int8(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, out: Tensor) -> None:
    return None


def tile_gate(x: Tensor, packed: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], packed.shape[0] * 16))


def tile_gate_int8(
    x: Tensor, x_scales: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, hadamard: int
) -> tuple[Tensor, Tensor]:
    return _int8_rows(x, packed.shape[0] * 16)


def _best(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=torch.int64), x.new_empty(x.shape[0], dtype=torch.bool)


def register_fakes() -> None:
    for fake in (
        add_rms_norm,
        add_rms_norm_int8,
        silu_mul,
        quantise_rows,
        rotary_write_kv,
        attention,
        stored_rotary_write,
        matvec,
        wide_linear,
        wide_best,
        tile_pack,
        tile_linear,
        tile_linear_int8,
        tile_best,
        tile_gate,
        tile_gate_int8,
    ):
        torch.library.register_fake(f"v4flash::{fake.__name__}", fake)
