"""Who says how much of a prompt runs in a step."""

from collections.abc import Mapping

import pytest

from worker.errors import StartError
from worker.prefill_chunk import PrefillChunks


def by_size(body_bytes: int, headers: Mapping[str, bytes]) -> int | None:
    return 64 if body_bytes > 1000 or headers.get("x-kind") == b"long" else None


def test_the_header_wins_then_the_hook_then_the_engine() -> None:
    """A hook sees the size of the body and the headers, whose names are in lower case."""
    chunks = PrefillChunks(by_size)
    assert chunks.choose(16, 5000, ()) == 16
    assert chunks.choose(None, 5000, ()) == 64
    assert chunks.choose(None, 10, (("X-Kind", b"long"),)) == 64
    assert chunks.choose(None, 10, ()) is None
    assert PrefillChunks().choose(None, 5000, ()) is None


@pytest.mark.parametrize("result", [0, -1, "64", 1 << 30, ValueError("mine")])
def test_a_hook_that_breaks_fails_no_request(result: object) -> None:
    """What it raises or returns instead of a number of tokens leaves the choice to the engine."""

    def broken(body_bytes: int, headers: Mapping[str, bytes]) -> int | None:
        if isinstance(result, Exception):
            raise result
        return result  # type: ignore[return-value]

    assert PrefillChunks(broken).choose(None, 10, ()) is None


def test_a_hook_that_is_not_there_ends_the_start() -> None:
    """With a message that names the setting; one that is there is found."""
    with pytest.raises(StartError, match="prefill_chunk_hook"):
        PrefillChunks.of_setting("worker.prefill_chunk:nothing")
    assert PrefillChunks.of_setting("math:comb").choose(3, 10, ()) == 3
    assert PrefillChunks.of_setting(None).choose(None, 10, ()) is None
