"""The pieces of an answer join to the same text however its tokens come, and never show half a character."""

from hypothesis import given
from hypothesis import strategies as st

from engine.scripted_answer import ByteTokenizer
from engine.text.detokenizer import Detokenizer

TOKENIZER = ByteTokenizer()


def pieces(data: bytes, size: int, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(TOKENIZER, stop)
    texts = [detokenizer.push(tuple(data[i : i + size])) for i in range(0, len(data), size)]
    return [*texts, detokenizer.finish()], detokenizer


def test_an_emoji_over_four_tokens_comes_whole() -> None:
    """Nothing until its last byte, then all of it."""
    texts, _ = pieces("a😀b".encode(), 1)
    assert texts == ["a", "", "", "", "😀", "b", ""]


def test_half_a_character_at_the_end_becomes_a_replacement() -> None:
    """An answer cut inside a character ends with U+FFFD, once."""
    texts, detokenizer = pieces("ok😀".encode()[:4], 1)
    assert "".join(texts) == "ok\ufffd"
    assert detokenizer.finish() == ""


def test_a_stop_string_over_chunks_is_never_shown() -> None:
    """Its beginning is held back until it is sure."""
    texts, detokenizer = pieces(b"hello STOP more", 3, ("STOP",))
    assert "".join(texts) == "hello "
    assert detokenizer.stopped
    assert detokenizer.push((65,)) == "" == detokenizer.finish()


def test_a_beginning_that_comes_to_nothing_is_released() -> None:
    """Held back text appears when it turns out otherwise, or at the end."""
    detokenizer = Detokenizer(TOKENIZER, ("STOP",))
    assert [detokenizer.push(tuple(text)) for text in (b"ST", b"A", b"STO")] == ["", "STA", ""]
    assert detokenizer.finish() == "STO" and not detokenizer.stopped


def test_special_tokens_give_no_text() -> None:
    """They are skipped wherever they stand, even inside a character."""
    detokenizer = Detokenizer(TOKENIZER)
    smile = "😀".encode()
    assert detokenizer.push((256, *smile[:2], 257, *smile[2:])) == "😀"


@given(
    data=st.one_of(st.binary(max_size=60), st.text("ab😀é", max_size=30).map(str.encode)),
    stop=st.lists(st.text("ab😀", min_size=1, max_size=3), max_size=3),
    size=st.integers(1, 9),
)
def test_chunks_do_not_matter(data: bytes, stop: list[str], size: int) -> None:
    """Any division of any bytes gives the text of one token at a time, without any stop string in it."""
    one, first = pieces(data, 1, tuple(stop))
    other, second = pieces(data, size, tuple(stop))
    whole = data.decode("utf-8", "replace")
    assert "".join(one) == "".join(other) and first.stopped == second.stopped
    assert whole.startswith("".join(one)) and not any(text in "".join(one) for text in stop)
    assert first.stopped == any(text in whole for text in stop)
    assert first.stopped or "".join(one) == whole
