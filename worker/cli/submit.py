"""`v4flash submit`: where the prompt comes from, and what is shown of its answer."""

import asyncio
import sys
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

from topics.attempts import AttemptReader, AttemptState, EventKind
from topics.names import TopicNames
from worker.broker.api import Broker, BrokerError
from worker.cli.terminal import shown_text
from worker.client import Client, NoAnswerError, Prompt
from worker.errors import SettingsError

EXIT_REFUSED = 1
EXIT_TIMED_OUT = 124
CANCEL_SECONDS = 5.0
NOTICE_SECONDS = 10.0


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


async def submit_prompt(broker: Broker, names: TopicNames, prompt: Prompt, timeout_seconds: float | None) -> int:
    """Print the answer as it streams. Exit code 0 answered, 1 refused, 124 too late; both of the latter are explained.

    Whoever interrupts or runs out of time leaves no work behind: the workers are asked to cancel.
    """
    answer = AttemptReader()
    print(f"request {prompt.request_id}", file=sys.stderr)
    async with Client(broker, names) as client:
        try:
            await _show(client, prompt, answer, timeout_seconds)
        except NoAnswerError as error:
            print(f"v4flash: {error}; cancelled", file=sys.stderr)
            await _cancel(client, prompt)
            return EXIT_TIMED_OUT
        except asyncio.CancelledError:
            print("v4flash: interrupted; cancelled", file=sys.stderr)
            await _cancel(client, prompt)
            raise
    if answer.state is AttemptState.ERROR:
        error_body = answer.error or {}
        print(f"v4flash: {error_body.get('code')}: {error_body.get('message')}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


async def _show(client: Client, prompt: Prompt, answer: AttemptReader, timeout_seconds: float | None) -> None:
    shown = False
    unheard = f"no answer yet: `v4flash inspect {prompt.request_id}` says where the prompt is"
    notice = asyncio.get_running_loop().call_later(NOTICE_SECONDS, partial(print, unheard, file=sys.stderr))
    try:
        async with aclosing(client.events(prompt, answer, timeout_seconds=timeout_seconds)) as events:
            async for event in events:
                notice.cancel()
                if event.kind is EventKind.SHOW and shown:
                    print("\n[a new attempt begins]", file=sys.stderr)
                elif event.kind is EventKind.TEXT:
                    shown = True
                    print(shown_text(event.text, keep="\n\t"), end="", flush=True)
    finally:
        notice.cancel()
        if shown:
            print(flush=True)


async def _cancel(client: Client, prompt: Prompt) -> None:
    with suppress(TimeoutError, BrokerError):
        async with asyncio.timeout(CANCEL_SECONDS):
            await client.cancel(prompt.request_id, priority=prompt.priority)


__all__ = ["EXIT_REFUSED", "EXIT_TIMED_OUT", "prompt_text", "submit_prompt"]
