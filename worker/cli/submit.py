"""`v4flash submit`: where the prompt comes from, and what is shown of its answer."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

from topics.attempts import AttemptReader, AttemptState, EventKind
from topics.names import TopicNames
from worker import client
from worker.broker.api import Broker, BrokerError
from worker.errors import SettingsError

EXIT_REFUSED = 1
EXIT_TIMED_OUT = 124
CANCEL_SECONDS = 5.0


def prompt_text(argument: str | None, file: Path | None) -> str:
    """The prompt from a file, the argument, or standard input. Raises SettingsError for one that cannot be used."""
    if argument not in (None, "-") and file is not None:
        raise SettingsError("give the prompt or --file, not both")
    try:
        if file is not None:
            text = file.read_bytes().decode("utf-8")
        elif argument in (None, "-"):
            if sys.stdin.isatty():
                print("reading the prompt from the terminal, end it with Ctrl-D", file=sys.stderr)
            text = sys.stdin.buffer.read().decode("utf-8")
        else:
            text = argument
    except OSError as error:
        raise SettingsError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"the prompt is not UTF-8 (byte {error.start})") from error
    if not text.strip():
        raise SettingsError("the prompt is empty")
    return text


async def submit_prompt(broker: Broker, names: TopicNames, prompt: client.Prompt, timeout_seconds: float | None) -> int:
    """Print the answer as it streams. Exit code 0 answered, 1 refused, 124 too late; both of the latter are explained.

    Whoever interrupts or runs out of time leaves no work behind: the workers are asked to cancel.
    """
    answer, shown = AttemptReader(), False
    print(f"request {prompt.request_id}", file=sys.stderr)
    try:
        async for event in client.ask(broker, names, prompt, answer, timeout_seconds=timeout_seconds):
            if event.kind is EventKind.SHOW and shown:
                print("\n[a new attempt begins]", file=sys.stderr)
            elif event.kind is EventKind.TEXT:
                shown = True
                print(event.text, end="", flush=True)
    except client.NoAnswerError as error:
        _end_line(shown)
        print(f"v4flash: {error}; cancelled", file=sys.stderr)
        await _cancel(broker, names, prompt)
        return EXIT_TIMED_OUT
    except asyncio.CancelledError:
        _end_line(shown)
        print("v4flash: interrupted; cancelled", file=sys.stderr)
        await _cancel(broker, names, prompt)
        raise
    _end_line(shown)
    if answer.state is AttemptState.ERROR:
        error_body = answer.error or {}
        print(f"v4flash: {error_body.get('code')}: {error_body.get('message')}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _end_line(shown: bool) -> None:
    if shown:
        print(flush=True)


async def _cancel(broker: Broker, names: TopicNames, prompt: client.Prompt) -> None:
    with suppress(TimeoutError, BrokerError):
        async with asyncio.timeout(CANCEL_SECONDS):
            await client.cancel(broker, names, prompt.request_id)


__all__ = ["EXIT_REFUSED", "EXIT_TIMED_OUT", "prompt_text", "submit_prompt"]
