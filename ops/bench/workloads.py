"""The four workloads, on real English text that every Python ships (the language reference inside `pydoc_data`)."""

import random
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics

from peers.api import Prompt


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


def warm_up(prompts: list[Prompt]) -> list[Prompt]:
    """An eighth of the prompts with short answers: enough to pack, compile and fault in what a first run would."""
    return [Prompt(prompt.token_ids, 8) for prompt in prompts[: max(1, len(prompts) // 8)]]


def windows(tokens: list[int], count: int = 16, length: int = 1024) -> list[list[int]]:
    """Pieces of text spread over the corpus; `length` tokens of each are scored, so 16,384 in all by default."""
    stride = (len(tokens) - length - 1) // count
    return [tokens[start : start + length + 1] for start in range(0, count * stride, stride)]
