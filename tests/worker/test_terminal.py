"""What others write does nothing to a person's terminal."""

import asyncio

import pytest

from topics.replies import ReplyContext, chunk_record
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


async def test_an_answer_cannot_write_to_the_terminal(rig, capsys):
    """What a model says is text of somebody else."""
    showing = asyncio.create_task(submit_prompt(rig.broker, rig.names, Prompt("x", request_id="r"), 10))
    prompts = rig.broker.reader([rig.names.prompts("standard")], from_beginning=True)
    await prompts.start()
    assert await prompts.poll(1, 10)
    context = ReplyContext("r", "one", "/v1/chat/completions", "m", 0)
    said = chunk_record(context, 0, index=0, text="\x1b[2Jno\n", role_first=True, finish_reason="stop", final=True)
    await rig.producer.send(rig.names.replies, said[0], headers=said[1])
    assert await showing == 0
    assert capsys.readouterr().out == "\\x1b[2Jno\n\n"
