"""How the KV cache of a model lies in memory: dtype of each layer, bytes of a block and of a tail. No tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

KVDtype = Literal["fp16", "bf16", "fp32", "int8"]
KVDtypeChoice = Literal["auto", "fp16", "bf16", "fp32", "int8"]
KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)
ITEM_BYTES = MappingProxyType({"fp16": 2, "bf16": 2, "fp32": 4, "int8": 1})
SCALE_BYTES = 2  # of a float16
_ALIGNMENT = 64  # of a layer in its block: a cache line


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One group of paged layers. All layers of a block are contiguous, so that a block moves in one copy.

    A layer of a block is [2, K, B, D] elements, keys first, followed for int8 by its scales [2, K, B, C] in float16,
    one for each `group_size` channels. A layer stored in another form than the compute dtype has a tail for each
    running sequence: the rows of the block in which it is writing, all but the last, in compute dtype.
    """

    layer_dtypes: tuple[KVDtype, ...]
    compute_dtype: KVDtype
    num_kv_heads: int
    head_dim: int
    block_size: int
    group_size: int = 64
    rank: int = 0
    world_size: int = 1

    @property
    def num_groups(self) -> int:
        """Scales of a head's row; the last one may be of fewer channels."""
        return -(-self.head_dim // self.group_size)

    def has_tail(self, layer: int) -> bool:
        return self.layer_dtypes[layer] != self.compute_dtype

    @property
    def num_rows(self) -> int:
        """Key and value rows of a layer of a block, over all heads."""
        return 2 * self.num_kv_heads * self.block_size

    def layer_bytes(self, layer: int) -> int:
        dtype = self.layer_dtypes[layer]
        scales = self.num_groups * SCALE_BYTES if dtype == "int8" else 0
        used = self.num_rows * (self.head_dim * ITEM_BYTES[dtype] + scales)
        return -(-used // _ALIGNMENT) * _ALIGNMENT

    def layer_offsets(self) -> list[int]:
        """Where each layer begins in a block."""
        offsets = [0]
        for layer in range(len(self.layer_dtypes) - 1):
            offsets.append(offsets[-1] + self.layer_bytes(layer))
        return offsets

    @property
    def bytes_per_block(self) -> int:
        """Padded to no sector of a disk. Where a layer has no tail, blocks are whole pages of such a layer apart (a
        page is what a block holds of one head's keys), so that its pages can be counted through all blocks."""
        layers = range(len(self.layer_dtypes))
        used = sum(map(self.layer_bytes, layers))
        if all(map(self.has_tail, layers)):
            return used
        page = self.block_size * self.head_dim * ITEM_BYTES[self.compute_dtype]
        return -(-used // page) * page

    @property
    def bytes_per_tail(self) -> int:
        rows = 2 * self.num_kv_heads * (self.block_size - 1)
        of_layer = rows * self.head_dim * ITEM_BYTES[self.compute_dtype]
        return of_layer * sum(self.has_tail(layer) for layer in range(len(self.layer_dtypes)))

    def num_blocks_in(self, memory_bytes: int, num_tails: int) -> int:
        """Blocks that fit beside the tails of as many running sequences. Raises ValueError if not even one does."""
        num_blocks = (memory_bytes - num_tails * self.bytes_per_tail) // self.bytes_per_block
        if num_blocks < 1:
            raise ValueError(
                f"{memory_bytes} bytes of KV cache hold no block: one takes {self.bytes_per_block} bytes, "
                f"the tails of {num_tails} sequences {num_tails * self.bytes_per_tail}"
            )
        return num_blocks

    @property
    def layout_id(self) -> str:
        """What of the layout changes the meaning of a block's bytes: part of every block's identity."""
        scales = f"/group={self.group_size}" if "int8" in self.layer_dtypes else ""
        return (
            f"block={self.block_size}/heads={self.num_kv_heads}x{self.head_dim}/kv={','.join(self.layer_dtypes)}"
            f"/compute={self.compute_dtype}{scales}/rank={self.rank}of{self.world_size}"
        )


def layer_dtypes(
    setting: KVDtypeChoice, of_model: str | Sequence[str | None] | None, compute_dtype: KVDtype, num_layers: int
) -> tuple[KVDtype, ...]:
    """The dtype of each layer. `of_model` is `kv_cache_dtype` of a model's config: a list names layers one by one and
    wins over the setting where it names one; a single name is the default that the setting replaces.

    Raises ValueError for unknown names and a list of the wrong length.
    """
    per_layer: list[str | None] = [None] * num_layers
    default = setting
    if isinstance(of_model, str):
        default = _known(of_model) if setting == "auto" else setting
    elif of_model is not None:
        per_layer = list(of_model)
        if len(per_layer) != num_layers:
            raise ValueError(f"kv_cache_dtype names {len(per_layer)} layers, the model has {num_layers}")
    chosen = [default if name is None else _known(name) for name in per_layer]
    return tuple(compute_dtype if name == "auto" else name for name in chosen)


def _known(name: str) -> KVDtypeChoice:
    for choice in get_args(KVDtypeChoice):
        if name == choice:
            return choice  # type: ignore[no-any-return]
    raise ValueError(f"kv_cache_dtype must be one of {', '.join(get_args(KVDtypeChoice))}, got {name!r}")
