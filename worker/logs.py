"""Structured logs on standard error: JSON for machines, aligned lines on a terminal. Never the text of a prompt."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

import structlog


def configure_logs(level: str = "info", *, log_format: str = "auto", stream: TextIO | None = None) -> None:
    """Set up logging of the process once, libraries' lines too; `auto` is lines on a terminal and JSON elsewhere.
    A line that finds no room on its disk is lost, and costs nothing else."""
    wanted = stream or sys.stderr
    console = log_format == "console" or (log_format == "auto" and wanted.isatty())
    out = cast(TextIO, _Lossy(wanted))
    renderer: Any = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    libraries = logging.StreamHandler(out)
    without_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    libraries.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared], processors=[without_meta, renderer]
        )
    )
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[libraries])


class _Lossy:
    """What a logger writes to; a failure to write is nobody's failure."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def frames_of(error: BaseException) -> str:
    """Where an unexpected error came from, and of what kind it and its causes are. Their own words are left out: where
    a prompt is at hand they may quote it."""
    told = []
    cause: BaseException | None = error
    while cause is not None:
        told.append("".join(traceback.format_tb(cause.__traceback__)) + type(cause).__name__)
        cause = cause.__cause__ or cause.__context__
    return "\n".join(told)


@contextmanager
def bound_request(request_id: str, **values: str) -> Iterator[None]:
    """Everything logged inside, in this task and the tasks it starts, carries the request id."""
    with structlog.contextvars.bound_contextvars(request_id=request_id, **values):
        yield
