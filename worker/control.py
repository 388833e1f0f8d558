"""Follows the control topic, which every worker reads whole. What its records mean is for those who take them."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from worker.broker.api import Reader, Record, UnreadableRecordsError

POLL_RECORDS = 500
POLL_SECONDS = 0.2
AGAIN_SECONDS = 5.0

log = structlog.get_logger(__name__)


def control_body(record: Record, kind: str) -> dict[str, Any] | None:
    """The body of a control record of this type; None for any other record, whatever its bytes: every worker reads
    it, at every start."""
    try:
        body = json.loads(record.value or b"null")
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) and body.get("type") == kind else None


class ControlReader:
    """Shows every record to every taker; a taker ignores what is not for it. Records that cannot be read are asked for
    again and never passed: one of them may be a cancel. `unready` says so meanwhile."""

    def __init__(self, reader: Reader, takers: Sequence[Callable[[Record], None]]) -> None:
        self.unready: str | None = None
        self._reader = reader
        self._takers = tuple(takers)

    async def catch_up(self) -> None:
        """Returns when all that is there now has been shown."""
        while not await self._reader.at_end():
            await self._take()

    async def run(self) -> None:
        """Follow the topic until cancelled."""
        while True:
            await self._take()

    async def _take(self) -> None:
        try:
            records = await self._reader.poll(POLL_RECORDS, POLL_SECONDS)
        except UnreadableRecordsError as error:  # it would end every worker, at every start
            log.warning("control records cannot be read", error=str(error))
            self.unready = "control records cannot be read"
            await asyncio.sleep(AGAIN_SECONDS)
            return
        self.unready = None
        for record in records:
            for take in self._takers:
                take(record)
