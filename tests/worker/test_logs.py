"""What a machine that reads the logs relies on."""

import errno
import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from worker.logs import bound_request, configure_logs


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Where the log goes; afterwards logging is as it was."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    stream, before = io.StringIO(), structlog.get_config()
    configure_logs("info", log_format="json", stream=stream)
    yield stream
    structlog.configure(**before)


def test_every_line_is_json_also_those_of_libraries(lines: io.StringIO) -> None:
    """A line of a library has the fields of ours, and what was raised with it."""
    structlog.get_logger("worker").info("ours", port=1)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("library.connection").warning("node %d is gone", 3, exc_info=True)
    ours, theirs = (json.loads(line) for line in lines.getvalue().splitlines())
    assert (ours["event"], ours["level"], ours["port"]) == ("ours", "info", 1)
    assert (theirs["event"], theirs["level"], theirs["logger"]) == ("node 3 is gone", "warning", "library.connection")
    assert "ValueError: broken" in theirs["exception"]
    assert ours.keys() & theirs.keys() >= {"event", "level", "timestamp"}


def test_lines_within_a_request_carry_its_id(lines: io.StringIO) -> None:
    """Also those that a library writes there."""
    with bound_request("r-1"):
        structlog.get_logger("worker").info("ours")
        logging.getLogger("library").warning("theirs")
    assert [json.loads(line)["request_id"] for line in lines.getvalue().splitlines()] == ["r-1", "r-1"]


class FullDisk(io.StringIO):
    """Nothing can be written to it."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_line_that_finds_no_room_is_lost_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is no reason to fail a request."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    before = structlog.get_config()
    configure_logs("info", log_format="json", stream=FullDisk())
    structlog.get_logger("worker").info("ours")
    logging.getLogger("library").warning("theirs")
    structlog.configure(**before)
