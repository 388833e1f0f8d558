"""`v4flash dead-letter`: what could not be served, why, and sending it again."""

import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated

import typer

from worker.broker.api import Broker
from worker.cli.flags import LoadedSettings, with_client_settings
from worker.cli.run import command_broker, run_command
from worker.cli.terminal import shown_text
from worker.errors import SettingsError
from worker.letter import Letter, NotReplayableError, parse_letter, shown
from worker.scan import scan

CONTEXT = {"token_normalize_func": lambda token: token.replace("_", "-"), "help_option_names": ["-h", "--help"]}
MESSAGE_CHARS = 80
EXIT_INCOMPLETE = 1

dead_letter_app = typer.Typer(no_args_is_help=True, help="Prompts that could not be served.")

Places = Annotated[list[str], typer.Argument(metavar="PARTITION:OFFSET...", help="As `list` prints them.")]
Reason = Annotated[str | None, typer.Option("--reason", help="Only those with this reason.")]


@dead_letter_app.command("list", context_settings=CONTEXT)
@with_client_settings
def list_letters(loaded: LoadedSettings, reason: Reason = None) -> None:
    """Print place, reason, origin, request id and message of each."""
    run_command(_list(command_broker(loaded.settings), loaded.settings.names.dead_letter, reason))


@dead_letter_app.command("show", context_settings=CONTEXT)
@with_client_settings
def show_letter(loaded: LoadedSettings, places: Places) -> None:
    """Print whole letters as JSON, prompts included."""
    wanted = set(map(_place, places))
    broker, topic = command_broker(loaded.settings), loaded.settings.names.dead_letter
    raise typer.Exit(run_command(_show(broker, topic, wanted)))


@dead_letter_app.command("replay", context_settings=CONTEXT)
@with_client_settings
def replay_letters(
    loaded: LoadedSettings,
    places: Annotated[list[str] | None, typer.Argument(metavar="[PARTITION:OFFSET...]")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that are there now.")] = False,
    reason: Reason = None,
    keep_deadline: Annotated[bool, typer.Option("--keep-deadline", help="They may be too late at once.")] = False,
) -> None:
    """Send prompts again to the topic they came from, with the request id they had."""
    if bool(places) == everything:
        raise SettingsError("name letters as PARTITION:OFFSET, or give --all")
    wanted = None if everything else set(map(_place, places or ()))
    broker, topic = command_broker(loaded.settings), loaded.settings.names.dead_letter
    replaying = replay(broker, topic, wanted, reason=reason, keep_deadline=keep_deadline)
    raise typer.Exit(run_command(replaying))


async def letters(broker: Broker, topic: str) -> AsyncIterator[Letter]:
    """All that are there now, partition by partition. Raises BrokerError."""
    async with aclosing(scan(broker, [topic])) as records:
        async for record in records:
            yield parse_letter(record)


async def replay(
    broker: Broker, topic: str, wanted: set[str] | None, *, reason: str | None, keep_deadline: bool
) -> int:
    """Send the wanted letters (None: all) again; each is printed when it is acknowledged. Exit code 1 when one that
    was wanted is not there or cannot be sent; the others are sent all the same. Raises BrokerError."""
    chosen = [letter async for letter in letters(broker, topic) if _is_wanted(letter, wanted, reason)]
    code = _missing(wanted, chosen)
    producer = broker.producer()
    await producer.start()
    try:
        for letter in chosen:
            try:
                to, key, value, headers = letter.replay(keep_deadline=keep_deadline)
            except NotReplayableError as error:
                print(f"v4flash: {error}", file=sys.stderr)
                code = EXIT_INCOMPLETE
                continue
            await producer.send(to, value, key=key, headers=headers)
            print(f"{letter.place} sent to {to} as {letter.request_id}")
    finally:
        await producer.stop()
    return code


async def _list(broker: Broker, topic: str, reason: str | None) -> None:
    num = 0
    async for letter in letters(broker, topic):
        if _is_wanted(letter, None, reason):
            num += 1
            message = " ".join(letter.message.split())[:MESSAGE_CHARS]
            print(shown_text(f"{letter.place} {letter.reason} {letter.origin} {letter.request_id} {message}"))
    if not num:
        print("no dead letters", file=sys.stderr)


async def _show(broker: Broker, topic: str, wanted: set[str]) -> int:
    found = [letter async for letter in letters(broker, topic) if letter.place in wanted]
    for letter in found:
        print(shown(letter))
    return _missing(wanted, found)


def _is_wanted(letter: Letter, wanted: set[str] | None, reason: str | None) -> bool:
    return (wanted is None or letter.place in wanted) and (reason is None or letter.reason == reason)


def _missing(wanted: set[str] | None, found: list[Letter]) -> int:
    absent = sorted((wanted or set()) - {letter.place for letter in found})
    for place in absent:
        print(f"v4flash: there is no dead letter {place}", file=sys.stderr)
    return EXIT_INCOMPLETE if absent else 0


def _place(text: str) -> str:
    partition, _, offset = text.partition(":")
    if not (partition.isdigit() and offset.isdigit()):
        raise SettingsError(f"{text} is no PARTITION:OFFSET")
    return f"{int(partition)}:{int(offset)}"


__all__ = ["dead_letter_app", "letters", "replay"]
