"""Log probabilities in the two forms of OpenAI: chat lists one object a token, text completions parallel lists."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from topics.requests import CHAT_COMPLETIONS

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say (OpenAI's own stand-in)."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A chosen token, its natural log probability, and the best alternatives as (text, log probability)."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


def logprobs_object(operation: str, entries: Sequence[TokenEntry], *, text_offset: int = 0) -> dict[str, Any]:
    """The `logprobs` of a choice or chunk. `text_offset` is the number of characters already sent (completions)."""
    if operation == CHAT_COMPLETIONS:
        return {
            "content": [
                _chat_token(entry.text, entry.logprob)
                | {"top_logprobs": [_chat_token(*alternative) for alternative in entry.top]}
                for entry in entries
            ]
        }
    offsets: list[int] = []
    for entry in entries:
        offsets.append(text_offset)
        text_offset += len(entry.text)
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [{text: _finite(logprob) for text, logprob in entry.top} for entry in entries],
        "text_offset": offsets,
    }


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _finite(logprob: float) -> float:
    """NaN and values below the lowest become the lowest."""
    return max(LOWEST_LOGPROB, logprob)
