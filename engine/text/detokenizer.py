"""Tokens to text, a few at a time: whole code points only, and nothing that may turn out to be a stop string."""

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenBytes(Protocol):
    """The part of a tokenizer that turns tokens back into text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; b"" for an id outside the vocabulary."""

    def is_special(self, token_id: int) -> bool:
        """Whether the token steers the model instead of being text."""


class Detokenizer:
    """Text of one growing answer. The pieces joined are the same however the tokens are divided into pushes: the text
    up to the stop string that is complete first, without it. Work is proportional to the new tokens. Bytes that are no
    UTF-8 become U+FFFD, special tokens give nothing."""

    def __init__(self, tokenizer: TokenBytes, stop: tuple[str, ...] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became certain; "" after a stop string."""
        if self.stopped:
            return ""
        pieces = (self._tokenizer.token_bytes(token) for token in token_ids if not self._tokenizer.is_special(token))
        return self._release(self._decoder.decode(b"".join(pieces)))

    def finish(self) -> str:
        """What was held back, when no more tokens come; "" after a stop string and at a second call."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _release(self, new: str) -> str:
        if not self._stop:
            return new
        text = self._held + new
        self._held = ""
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            _, start = min(found)
            return text[:start]
        held = max(_overlap(text, stop) for stop in self._stop)
        if held:
            self._held = text[-held:]
            return text[:-held]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
