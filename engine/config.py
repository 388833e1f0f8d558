"""What an engine is built with. Frozen; built once; knows no files and no devices."""

from dataclasses import dataclass
from pathlib import Path

from engine.cache.cold_admission import ColdAdmission
from engine.cache.spec import KVDtypeChoice
from engine.thermal import ThermalPolicy


@dataclass(frozen=True, slots=True)
class ColdConfig:
    """The SSD tier: `capacity_bytes` over all `directories`. `has_gate` and `has_deadline` off are for measurements."""

    directories: tuple[Path, ...]
    capacity_bytes: int
    admission: ColdAdmission = ColdAdmission.ROOM
    compress: bool = False
    num_readers: int = 4
    num_write_slots: int = 64
    has_gate: bool = True
    has_deadline: bool = True

    def __post_init__(self) -> None:
        if not self.directories:
            raise ValueError("enable_l3_cache needs an l3_cache_path")
        if self.capacity_bytes < 1:
            raise ValueError("enable_l3_cache needs a swap_space above 0")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of the engine. Counts are `num_`, limits `max_`; a block is `block_size` tokens of KV cache.

    With `enable_interrupts` urgent prefill may run inside a step, between two of its segments. Reserved slots and
    blocks are taken by urgent requests only. The target bounds prefill in a step in which somebody decodes.
    `kv_cache_memory_bytes`, where given, replaces `num_blocks` by what fits, once the model is known.
    """

    block_size: int = 16
    num_blocks: int = 2048
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: KVDtypeChoice = "auto"  # the compute dtype
    kv_cache_group_size: int = 64  # channels of one scale of an int8 cache
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_model_len: int = 2048
    prefill_chunk_size: int = 512
    enable_prefix_caching: bool = True
    enable_interrupts: bool = True
    urgent_reserved_seqs: int = 0
    urgent_reserved_blocks: int = 0
    inter_token_target_seconds: float | None = None
    thermal: ThermalPolicy | None = None
    cold: ColdConfig | None = None

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "num_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "prefill_chunk_size",
            "kv_cache_group_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, limit in (("urgent_reserved_seqs", "max_num_seqs"), ("urgent_reserved_blocks", "num_blocks")):
            if not 0 <= getattr(self, name) < getattr(self, limit):
                raise ValueError(f"{name} must be from 0 to {limit} - 1, got {getattr(self, name)}")
        if self.inter_token_target_seconds is not None and not self.inter_token_target_seconds > 0:
            raise ValueError(f"inter_token_target_seconds must be above 0, got {self.inter_token_target_seconds}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if self.cold is not None and not self.enable_prefix_caching:
            raise ValueError("enable_l3_cache needs enable_prefix_caching")

    @property
    def num_tail_slots(self) -> int:
        """One for each sequence that may run, and one for a sequence that is larger than the memory."""
        return self.max_num_seqs + (self.cold is not None)

    def max_chunk(self, asked: int | None) -> int:
        """Prompt tokens of one request in a step, which may ask for fewer or more than the setting."""
        return min(asked or self.prefill_chunk_size, self.max_num_batched_tokens)
