"""Whether this machine's wall clock agrees with the broker's, which stamps every record when it is appended."""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable

import structlog

from worker.broker.api import BrokerError, Producer, Record
from worker.clock import Clock
from worker.control import control_body

MAX_OFF_SECONDS = 60.0
ASK_SECONDS = 60.0
KEY = b'["clock"]'

log = structlog.get_logger(__name__)


class ClockCheck:
    """Writes a record to the control topic now and then, and compares its time with when it was sent and read.

    While they are more than `MAX_OFF_SECONDS` apart, `reason` says so and no deadline is to be believed: a wrong clock
    would end requests that have time, or answer those that have none.
    """

    def __init__(self, producer: Producer, topic: str, clock: Clock) -> None:
        self.reason: str | None = None
        self._producer = producer
        self._topic = topic
        self._clock = clock
        self._id = uuid.uuid4().hex

    def __repr__(self) -> str:
        return f"ClockCheck({self.reason or 'agrees'})"

    async def ask(self) -> None:
        """Write one; a broker that does not take it tells nothing of the time."""
        value = json.dumps({"type": "clock", "id": self._id, "sent_ms": self._clock.wall_ms()}).encode()
        try:
            await self._producer.send(self._topic, value, key=KEY)
        except BrokerError as error:
            log.info("the clock was not compared with the broker's", error=str(error) or type(error).__name__)

    async def run(self, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Ask again and again, until cancelled: a clock may be set while we run."""
        while True:
            await sleep(ASK_SECONDS)
            await self.ask()

    def take(self, record: Record) -> None:
        """A record of the control topic; what is not ours, or has its client's time, is ignored."""
        sent_ms = self._sent_ms(record)
        if sent_ms is None or not record.append_time:
            return
        ahead_ms = max(sent_ms - record.timestamp_ms, record.timestamp_ms - self._clock.wall_ms())
        if ahead_ms <= MAX_OFF_SECONDS * 1000:
            if self.reason is not None:
                log.info("the clock agrees with the broker's again")
            self.reason = None
            return
        side = "ahead of" if sent_ms > record.timestamp_ms else "behind"
        if self.reason is None:
            log.error("deadlines are suspended: the clock is wrong", seconds=round(ahead_ms / 1000), side=side)
        self.reason = f"the clock is {ahead_ms / 1000:.0f} s {side} the broker's, deadlines are suspended"

    def _sent_ms(self, record: Record) -> int | None:
        if record.key != KEY:
            return None
        body = control_body(record, "clock")
        if body is None or body.get("id") != self._id:
            return None
        sent_ms = body.get("sent_ms")
        return sent_ms if isinstance(sent_ms, int) else None
