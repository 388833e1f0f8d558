"""Tokens to text as they come: whole code points only, and nothing that a stop string may still swallow."""

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class Detokenizer:
    """Incremental text of one choice. After `stopped` nothing more comes out; the stop string itself never does."""

    def __init__(self, tokenizer: TokenBytes, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(s for s in stop if s)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """New text that is certain; control tokens have none."""
        if self.stopped:
            return ""
        for token_id in token_ids:
            if not self._tokenizer.is_special(token_id):
                self._held += self._decoder.decode(self._tokenizer.token_bytes(token_id))
        return self._release()

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        out = self._release()
        return out if self.stopped else out + self._take(len(self._held))

    def _release(self) -> str:
        ends = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            return self._take(min(ends))
        return self._take(len(self._held) - self._num_possible_stop())

    def _take(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out

    def _num_possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
