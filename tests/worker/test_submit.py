"""What `v4flash submit` promises to the person who waits."""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from topics.names import TopicNames
from worker.broker.api import BrokerUnavailableError, TopicNotAvailableError
from worker.broker.memory import MemoryBroker
from worker.cli import run
from worker.cli.submit import EXIT_REFUSED, EXIT_TIMED_OUT, prompt_text, submit_prompt
from worker.client import Client, NoAnswerError, Prompt
from worker.errors import SettingsError
from worker.logs import configure_logs
from worker.provision import create_topics, topics_of
from worker.serve import build_broker
from worker.settings import Settings

NAMES = TopicNames()


@pytest.fixture
async def broker() -> AsyncIterator[MemoryBroker]:
    broker = MemoryBroker()
    await create_topics(broker.admin(), topics_of(NAMES, max_body_bytes=20_000, num_partitions=2))
    yield broker


async def test_a_prompt_that_nobody_answers_is_cancelled_when_its_time_is_up(
    broker: MemoryBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 124, one line that says so, and no work left behind."""
    prompt = Prompt("hello")
    assert await submit_prompt(broker, NAMES, prompt, 0.01) == EXIT_TIMED_OUT
    assert "not answered within 0.01 s" in capsys.readouterr().err
    assert len(broker.records(NAMES.control)) == 1


async def test_who_hears_nothing_for_long_is_told_how_to_look(
    broker: MemoryBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker runs: the command that says where the prompt is, with its id."""
    monkeypatch.setattr("worker.cli.submit.NOTICE_SECONDS", 0.0)
    prompt = Prompt("hello")
    assert await submit_prompt(broker, TopicNames(), prompt, 0.05) == EXIT_TIMED_OUT
    assert f"v4flash inspect {prompt.request_id}" in capsys.readouterr().err


async def test_a_prompt_that_is_interrupted_is_cancelled(broker: MemoryBroker) -> None:
    """Ctrl-C reaches the workers too, and the interruption goes on."""
    task = asyncio.create_task(submit_prompt(broker, NAMES, Prompt("hello"), None))
    reader = broker.reader([NAMES.prompts("standard")], from_beginning=True)
    await reader.start()
    assert await reader.poll(1, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(broker.records(NAMES.control)) == 1


async def test_the_client_with_a_limit_gives_up_in_time(broker: MemoryBroker) -> None:
    """The error of a client that gave up is ours, and retriable."""
    async with Client(broker, NAMES) as client:
        with pytest.raises(NoAnswerError, match=r"within 0\.01 s") as raised:
            await client.ask(Prompt("hello"), timeout_seconds=0.01)
    assert raised.value.retriable


async def test_a_refused_prompt_says_why_and_fails(rig, capsys: pytest.CaptureFixture[str]) -> None:
    """The code and the message of the error reply, on one line."""
    async with rig.running(rig.app()):
        refused = Prompt("hello", max_tokens=0)
        assert await submit_prompt(rig.broker, NAMES, refused, 10) == EXIT_REFUSED
    assert "v4flash: invalid_value: max_tokens" in capsys.readouterr().err


async def test_an_answer_is_printed_and_succeeds(rig, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer alone is on standard output, so it can be piped."""
    configure_logs("error")
    prompt = Prompt("hello", max_tokens=8)
    async with rig.running(rig.app()):
        assert await submit_prompt(rig.broker, NAMES, prompt, 10) == 0
    assert capsys.readouterr().out == rig.answer(prompt.request_id) + "\n"


def _stdin(raw: bytes) -> SimpleNamespace:
    return SimpleNamespace(buffer=io.BytesIO(raw), isatty=lambda: False)


@pytest.mark.parametrize("argument", [None, "-"])
def test_a_prompt_may_come_from_standard_input(argument: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument, or with a dash."""
    monkeypatch.setattr("sys.stdin", _stdin("grüß".encode()))
    assert prompt_text(argument, None) == "grüß"


def test_a_prompt_may_come_from_a_file(tmp_path: Path) -> None:
    """All of it, as UTF-8."""
    path = tmp_path / "prompt.txt"
    path.write_text("one\ntwo", encoding="utf-8")
    assert prompt_text(None, path) == "one\ntwo"


def test_prompts_that_cannot_be_used_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent, and no traceback is shown."""
    monkeypatch.setattr("sys.stdin", _stdin(b"\xff"))
    for argument, file, reason in [
        (None, None, "not UTF-8"),
        (" ", None, "empty"),
        (None, tmp_path / "absent", "No such file"),
        ("both", tmp_path / "absent", "not both"),
    ]:
        with pytest.raises(SettingsError, match=reason):
            prompt_text(argument, file)


def test_what_makes_a_missing_topic_is_named() -> None:
    """The command to type, behind what is wrong."""

    async def failing() -> None:
        raise TopicNotAvailableError("there is no topic x")

    with pytest.raises(TopicNotAvailableError, match=r"there is no topic x .*v4flash topics create"):
        run.run_command(failing())


def test_a_cluster_that_is_not_there_is_named_in_a_sentence() -> None:
    """Which address was tried and how to learn more, and nothing of how the library prints a tuple."""
    settings = Settings(bootstrap_servers="127.0.0.1:1")
    broker = build_broker(settings, start_timeout_seconds=0.2)
    for client in (broker.admin(), broker.producer(), broker.reader(["t"], from_beginning=True)):
        with pytest.raises(BrokerUnavailableError) as told:
            run.run_command(client.start())
        assert str(told.value) == "no Kafka answers at 127.0.0.1:1 (`v4flash doctor kafka` says why)"
