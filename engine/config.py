"""What an engine is built with. Frozen; built once; knows no files and no devices."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of the engine. Counts are `num_`, limits `max_`; a block is `block_size` tokens of KV cache.
    With `enable_interrupts` urgent prefill may run inside a step, between two of its segments."""

    block_size: int = 16
    num_blocks: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_model_len: int = 2048
    prefill_chunk_size: int = 512
    enable_prefix_caching: bool = True
    enable_interrupts: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "num_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "prefill_chunk_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
