"""Runs one command's coroutine on the broker of its settings, and says in a person's words when that is not there."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import typer

from worker.broker.api import Broker, TopicNotAvailableError
from worker.serve import build_broker
from worker.settings import Settings

T = TypeVar("T")

EXIT_INTERRUPTED = 130
CONNECT_SECONDS = 10.0


def command_broker(settings: Settings) -> Broker:
    """The broker of the settings for a person who waits: an address that does not answer is given up soon."""
    silence_client()
    return build_broker(settings, start_timeout_seconds=CONNECT_SECONDS)


def silence_client() -> None:
    """Keep the Kafka library's own log lines from a person: what a user can mend is said once, by the command."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


def run_command(command: Coroutine[Any, Any, T]) -> T:
    """What `command` returns; exits with 130 after Ctrl-C. Raises BrokerError that says what to do."""
    try:
        return asyncio.run(command)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except TopicNotAvailableError as error:
        raise TopicNotAvailableError(f"{error} (`v4flash topics create` makes those of the workers)") from error


__all__ = ["CONNECT_SECONDS", "EXIT_INTERRUPTED", "command_broker", "run_command", "silence_client"]
