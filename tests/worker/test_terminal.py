"""What others write does nothing to a person's terminal."""

import pytest

from engine.scripted import ScriptedEngine
from worker.cli.submit import submit_prompt
from worker.cli.terminal import shown_text
from worker.client import Prompt


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain, ümlaut, 漢字, 🎈", "plain, ümlaut, 漢字, 🎈"),
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("line\r\nnext\x07", "line\\r\\nnext\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202etxt.exe", "\\u202etxt.exe"),
        ("zero\u200bwidth \u00a0 space", "zero\u200bwidth \u00a0 space"),
    ],
)
def test_control_characters_are_escaped_and_other_text_stays(text: str, shown: str) -> None:
    """Escape sequences, bells, C1 controls, and marks that turn text around."""
    assert shown_text(text) == shown


def test_a_stream_keeps_its_lines_and_tabs() -> None:
    """What a person wants to read."""
    assert shown_text("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


async def test_an_answer_cannot_write_to_the_terminal(rig, capsys, monkeypatch):
    """What a model says is text of somebody else."""
    monkeypatch.setattr("engine.scripted.answer_bytes", lambda *_: tuple("\x9b31mno".encode()))
    async with rig.running(rig.app(ScriptedEngine())):
        assert await submit_prompt(rig.broker, rig.names, Prompt("x", max_tokens=7), 10) == 0
    assert capsys.readouterr().out.endswith("\\x9b31mno\n")
