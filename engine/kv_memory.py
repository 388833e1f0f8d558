"""The memory of the KV cache: its blocks as bytes, for who moves them, and layer by layer, for who computes."""

import torch
from torch import Tensor

from engine.cache.spec import CacheSpec, KVDtype
from engine.device import zeros
from kernels.kv import LayerKV

TORCH_DTYPES: dict[KVDtype, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "int8": torch.int8,
}


class KVCacheMemory:
    """`num_blocks` blocks of one layout, and tails for `num_tails` running sequences where a layer needs them. The
    blocks lie in `memory`, where it is given: as many bytes as they take."""

    def __init__(self, spec: CacheSpec, num_blocks: int, num_tails: int, *, memory: Tensor | None = None) -> None:
        self.spec, self.num_blocks = spec, num_blocks
        shape = (num_blocks, spec.bytes_per_block)
        self._blocks = zeros(shape, torch.uint8) if memory is None else memory.view(shape)
        self.layers = [self._layer(index, num_tails) for index in range(len(spec.layer_dtypes))]

    @property
    def bytes_per_block(self) -> int:
        return self.spec.bytes_per_block

    def block_bytes(self, block_id: int) -> memoryview:
        """All layers of one block as writable bytes, aligned to no sector of a disk. Nothing may be running that reads
        or writes the block."""
        return memoryview(self._blocks[block_id].numpy())  # type: ignore[arg-type]  # Python below 3.12: no Buffer

    def bytes_of(self, block_ids: Tensor, start: int, end: int) -> Tensor:
        """A copy of bytes start:end of some blocks, [blocks, end - start]."""
        return self._blocks[:, start:end].index_select(0, block_ids)

    def put_bytes(self, block_ids: Tensor, start: int, values: Tensor) -> None:
        """The way back of `bytes_of`."""
        self._blocks[:, start : start + values.shape[1]].index_copy_(0, block_ids, values)

    def _layer(self, index: int, num_tails: int) -> LayerKV:
        spec, dtype = self.spec, self.spec.layer_dtypes[index]
        start = spec.layer_offsets()[index]
        heads = (2, spec.num_kv_heads, spec.block_size)
        body, after = self._view(start, TORCH_DTYPES[dtype], (*heads, spec.head_dim))
        scales = self._view(after, torch.float16, (*heads, spec.num_groups))[0] if dtype == "int8" else None
        tail = None
        if spec.has_tail(index):
            shape = (num_tails, 2, spec.num_kv_heads, spec.block_size - 1, spec.head_dim)
            tail = zeros(shape, TORCH_DTYPES[spec.compute_dtype])
        return LayerKV(body, scales, tail, spec.group_size)

    def _view(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, int]:
        """Elements of every block from a byte on, and the byte after them."""
        end = start + torch.Size(shape).numel() * dtype.itemsize
        return self._blocks[:, start:end].view(dtype).view(-1, *shape), end
