"""The four workloads, on real English text that every Python ships (the language reference inside `pydoc_data`)."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids in, and exactly `num_out` tokens out (end of sequence ignored)."""

    token_ids: tuple[int, ...]
    num_out: int


def corpus(encode: Callable[[str], Sequence[int]]) -> list[int]:
    """All token ids of the text, in a fixed order."""
    return [token for name in sorted(topics) for token in encode(topics[name])]


def make(name: str, tokens: list[int], repetition: int) -> list[Prompt]:
    """Prompts of workload W1..W4; another repetition has other prompts."""
    rng = random.Random(f"{name}-{repetition}")

    def cut(length: int) -> tuple[int, ...]:
        start = rng.randrange(len(tokens) - length)
        return tuple(tokens[start : start + length])

    if name == "W1":
        return [Prompt(cut(128), 128)]
    if name == "W2":
        return [Prompt(cut(rng.randint(50, 200)), 64) for _ in range(64)]
    if name == "W3":
        return [Prompt(cut(rng.randint(1_450, 1_550)), 64) for _ in range(16)]
    if name == "W4":
        prefix = cut(512)
        return [Prompt(prefix + cut(32), 16) for _ in range(64)]
    raise ValueError(f"workload must be W1, W2, W3 or W4, got {name}")
