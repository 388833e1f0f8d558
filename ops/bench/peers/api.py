"""What the benchmark asks of every engine, ours included.

Standard library only: each adapter runs in its engine's own environment.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids in, and exactly `num_out` tokens out (end of sequence ignored)."""

    token_ids: tuple[int, ...]
    num_out: int


@dataclass(slots=True)
class Clock:
    """Tokens of each prompt as they arrive, with the seconds since all prompts were handed over."""

    num_prompts: int
    outputs: list[list[int]] = field(init=False)
    first: list[float] = field(init=False)
    last: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in range(self.num_prompts)]
        self.first, self.last = [0.0] * self.num_prompts, [0.0] * self.num_prompts

    def arrived(self, index: int, token_ids: list[int], seconds: float) -> None:
        if token_ids and not self.outputs[index]:
            self.first[index] = seconds
        self.outputs[index] += token_ids
        self.last[index] = seconds


@dataclass(frozen=True, slots=True)
class Setup:
    """How an engine is to run: `precision` is bf16, int8 or fp32; the workload tells what to expect."""

    precision: str
    workload: str
    threads: int
    peers: Path  # where `make peers` put environments and weights

    @property
    def weights(self) -> Path:
        return self.peers / "weights"


class Adapter(Protocol):
    """One engine, loaded and ready. Made as `Adapter(setup)`; raises whatever the engine raises when it cannot run."""

    name: str  # with its version
    settings: dict[str, str]  # whatever differs from the engine's defaults

    def generate(self, prompts: list[Prompt]) -> Clock:
        """All prompts at once, greedily, nothing kept from an earlier call that could answer these."""

    def negative_log_likelihood(self, windows: list[list[int]]) -> float | None:
        """Nats a token over all tokens but the first of each window; None where the engine cannot tell."""

    def close(self) -> None:
        """End what the engine has started."""
