"""What the demo's view promises to whoever looks at it."""

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from engine.api import PriorityClass
from topics.attempts import AttemptEvent, EventKind
from worker.client import Prompt
from worker.demo import for_show
from worker.demo_answer import DemoAnswer
from worker.demo_view import DemoView, save_picture, summary
from worker.settings import Settings


def _answers() -> list[DemoAnswer]:
    return [DemoAnswer(Prompt(f"prompt {number}", cls)) for cls in PriorityClass for number in range(3)]


def _told(answer: DemoAnswer, *pieces: str, final: bool = True) -> None:
    answer.sent = 1.0
    headers: Sequence[tuple[str, bytes]]
    for seq, piece in enumerate(pieces):
        ends = final and seq == len(pieces) - 1
        headers = [("x-attempt", b"a"), ("x-seq", str(seq).encode()), ("x-event", b"final" if ends else b"chunk")]
        headers = [*headers, ("x-final", b"1")] if ends else headers
        reason = '"stop"' if ends else "null"
        usage = ', "usage": {"completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 16}}' if ends else ""
        body = f'{{"choices": [{{"index": 0, "delta": {{"content": "{piece}"}}, "finish_reason": {reason}}}]{usage}}}'
        for event in answer.reader.feed(headers, body.encode(), seq):
            answer.seen(event, 2.0 + seq)


def _frame(view: DemoView, height: int = 40) -> list[str]:
    console = Console(width=110, height=height, file=io.StringIO(), force_terminal=False)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("height", [24, 40, 60])
def test_the_view_has_one_height_that_fits_the_terminal(height: int) -> None:
    """Nothing jumps or scrolls while answers grow: short or long, waiting or done."""
    answers = _answers()
    before = len(_frame(DemoView(answers), height))
    for answer in answers:
        _told(answer, *["word " * 60] * 3, final=answer is answers[0])
    assert before == len(_frame(DemoView(answers), height)) < height


def test_an_answer_shows_its_newest_words_and_its_figures() -> None:
    """Tokens as the usage counts them, cached tokens, finish reason."""
    answers = _answers()
    _told(answers[0], "old " * 60, "and the newest")
    frame = "\n".join(_frame(DemoView(answers)))
    assert "and the newest" in frame
    assert "│ … old" in frame
    row = next(line for line in frame.splitlines() if "prompt 0" in line)
    assert "first token  tokens  tokens/s  cached" in frame
    assert row.split()[-7:-1] == ["1.00", "s", "7", "7.0", "16", "stop"]


def test_text_of_a_model_cannot_steer_the_terminal() -> None:
    """Control characters, and what looks like markup, are shown as text or not at all."""
    answers = _answers()
    _told(answers[0], "a\\u001b[2Jb", "[red]c[/red]")
    frame = "\n".join(_frame(DemoView(answers)))
    assert "\x1b" not in frame
    assert "[red]c[/red]" in frame


def test_the_table_has_a_row_for_each_prompt_also_without_an_answer() -> None:
    """A demo that failed still shows what came."""
    assert summary(_answers()).row_count == 9


def test_a_new_attempt_counts_its_pieces_from_zero() -> None:
    """Tokens of an attempt that was given up are not counted with those of the next."""
    answer = _answers()[0]
    answer.seen(AttemptEvent(EventKind.TEXT, "a", text="x"), 1.0)
    answer.seen(AttemptEvent(EventKind.SHOW, "b"), 2.0)
    assert answer.num_tokens == 0


def test_the_picture_fetches_nothing(tmp_path: Path) -> None:
    """It can be shown where no other host may be asked."""
    save_picture(DemoView(_answers()), tmp_path / "demo.svg")
    picture = (tmp_path / "demo.svg").read_text(encoding="utf-8")
    assert picture.startswith("<svg")
    assert "url(http" not in picture
    assert "@font-face" not in picture


def test_a_busy_machine_does_not_break_the_demo() -> None:
    """No answer ends as stalled because two tokens took seconds; a longer limit of the settings stays."""
    shown = for_show(Settings(streaming_timeout_ms=4000, first_token_timeout_ms=10**6))
    assert shown.streaming_timeout_ms >= 60_000
    assert shown.first_token_timeout_ms == 10**6
    assert shown.group_id != for_show(Settings()).group_id
