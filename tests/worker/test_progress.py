"""`x-progress: 1`: what a client hears before its answer, and that nothing else changes."""

import asyncio
import json

from engine.api import PriorityClass
from engine.scripted import ScriptedEngine
from topics.attempts import AttemptReader
from topics.progress import ProgressBody, ProgressEvent, ProgressHeaders
from worker.broker.api import BrokerUnavailableError
from worker.clock import SystemClock
from worker.progress import ProgressBook


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def wall_ms(self) -> int:
        return int(self.seconds * 1000)


def test_the_expected_wait_is_that_of_those_who_had_waited_as_long() -> None:
    """Waits of 2, 4 and 6 seconds: at the start 4 on average, after three 2, after six nobody knows."""
    clock, cls = Clock(), PriorityClass.BULK
    book = ProgressBook(clock, heartbeat_seconds=1)
    assert book.expected_wait_ms(cls, 0.0) is None
    for wait in (2.0, 4.0, 6.0):
        clock.seconds = wait
        book.observe(cls, 0.0)
    told = []
    for waited in (0.0, 3.0, 6.0):
        clock.seconds = 100.0 + waited
        told.append(book.expected_wait_ms(cls, 100.0))
    assert told == [4000, 2000, None]
    assert book.expected_wait_ms(PriorityClass.URGENT, 100.0) is None


async def test_an_event_that_cannot_be_sent_stands_in_nobodys_way() -> None:
    """Nor does one that nobody takes within a second; after the end nothing is sent."""
    sent: list[ProgressEvent] = []

    async def refuse(event: ProgressEvent, wait_ms: int | None) -> None:
        sent.append(event)
        raise BrokerUnavailableError("away")

    book = ProgressBook(SystemClock(), heartbeat_seconds=1)
    progress = book.follow(PriorityClass.BULK, 0.0, refuse)
    await progress.accepted()
    await progress.token()
    await progress.token()
    await progress.heartbeat()
    progress.ended()
    await progress.heartbeat()
    assert sent == [ProgressEvent.ACCEPTED, ProgressEvent.STARTED, ProgressEvent.HEARTBEAT]


async def test_a_request_hears_of_its_state_and_its_answer_is_the_same(rig, prompt):
    """Accepted, started, heartbeats, then the answer; a reader of attempts sees the answer alone."""
    engine = ScriptedEngine(tokens_per_second=40)
    for name, headers in {"asked": {"x_progress": "1"}, "plain": {}, "off": {"x_progress": "0"}}.items():
        await rig.send(prompt("[[tokens=8]]"), "urgent", x_request_id=name, x_correlation_id=f"c-{name}", **headers)
    await rig.serve_all(engine, progress_heartbeat_seconds=0.05)
    events = [reply.headers["x-event"].decode() for reply in rig.replies("asked")]
    assert events[:2] == ["accepted", "started"]
    assert events[-1] == "final"
    assert set(events[2:-1]) == {"heartbeat"}
    assert len(rig.replies("plain")) == len(rig.replies("off")) == 1
    for reply in rig.replies("asked")[:-1]:
        assert "x-seq" not in reply.headers
        assert reply.headers["x-correlation-id"] == b"c-asked"
        ProgressHeaders.model_validate({name: value.decode() for name, value in reply.headers.items()})
        ProgressBody.model_validate(reply.body)
    reader = AttemptReader()
    for reply in rig.replies("asked"):
        reader.feed(reply.record.headers, reply.record.value, reply.record.offset)
    assert reader.text == rig.replies("plain")[0].body["choices"][0]["message"]["content"]


async def test_an_invalid_prompt_is_not_accepted_and_a_client_of_spring_hears_nothing(rig, prompt):
    """Its template takes the first record for the answer."""
    await rig.send(b"{", x_request_id="bad", x_progress="1")
    await rig.producer.send(
        rig.names.prompts("bulk"),
        json.dumps(prompt()).encode(),
        headers=(("x-request-id", b"spring"), ("x-progress", b"1"), ("kafka_correlationId", b"0123456789abcdef")),
    )
    await rig.serve_all()
    assert rig.error("bad") == "invalid_json"
    assert {reply.headers["x-event"] for reply in rig.replies("spring")} == {b"final"}


async def test_an_error_is_the_last_that_is_heard(rig, prompt):
    """No heartbeat follows a terminal record."""
    await rig.send(prompt("[[stall]]"), x_request_id="r", x_progress="1")
    async with asyncio.timeout(10):
        await rig.app(first_token_timeout_ms=200, progress_heartbeat_seconds=0.02).run(until_end=True)
    events = [reply.headers["x-event"] for reply in rig.replies("r")]
    assert events[0] == b"accepted"
    assert events[-1] == b"error"
    assert b"heartbeat" in events
