"""How many tokens of a prompt may run in one step, where the client or the operator says so."""

from collections.abc import Callable, Mapping

import structlog

from topics.headers import MAX_PREFILL_CHUNK, WireHeaders
from worker.hooks import load_function

ChunkHook = Callable[[int, Mapping[str, bytes]], int | None]
"""From the size of the body in bytes and the headers (names in lower case) to tokens, or None."""

log = structlog.get_logger(__name__)


class PrefillChunks:
    """The header x-prefill-chunk wins, then the hook; None leaves the choice to the engine. A hook that raises or gives
    something else fails no request: it is logged and counts as None."""

    def __init__(self, hook: ChunkHook | None = None) -> None:
        self._hook = hook

    @classmethod
    def of_setting(cls, place: str | None) -> "PrefillChunks":
        """Raises StartError for a place where there is no function."""
        return cls(None if place is None else load_function("prefill_chunk_hook", place))

    def choose(self, asked: int | None, body_bytes: int, headers: WireHeaders) -> int | None:
        if asked is not None or self._hook is None:
            return asked
        try:
            chosen = self._hook(body_bytes, {name.lower(): value or b"" for name, value in headers})
        except Exception as error:  # code of an operator: its failure costs no prompt
            log.warning("prefill_chunk_hook failed", kind=type(error).__name__)
            return None
        if chosen is None or (isinstance(chosen, int) and 1 <= chosen <= MAX_PREFILL_CHUNK):
            return chosen
        log.warning("prefill_chunk_hook gave no number of tokens", kind=type(chosen).__name__)
        return None
