"""Runs one command's coroutine to its exit code, also when the user interrupts it."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import typer

from worker.broker.api import Broker
from worker.serve import build_broker
from worker.settings import Settings

EXIT_INTERRUPTED = 130
CONNECT_SECONDS = 10.0


def command_broker(settings: Settings) -> Broker:
    """The broker of the settings for a person who waits: an address that does not answer is given up soon."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # what a user can mend is said once, by the command
    return build_broker(settings, start_timeout_seconds=CONNECT_SECONDS)


def run_command(command: Coroutine[Any, Any, int | None]) -> None:
    """Exit with what `command` returns (None is 0), or with 130 after Ctrl-C."""
    try:
        code = asyncio.run(command)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    raise typer.Exit(code or 0)


__all__ = ["EXIT_INTERRUPTED", "command_broker", "run_command"]
