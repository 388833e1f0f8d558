"""A worker on the in-memory broker and the scripted engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import structlog

from engine.scripted import ScriptedEngine
from topics.attempts import AttemptReader
from topics.names import TopicNames
from topics.routes import RouteTable
from worker.app import WorkerApp
from worker.broker.api import NewTopic, Record, TopicPartition
from worker.broker.memory import MemoryBroker
from worker.clock import SystemClock
from worker.settings import Settings

NAMES = TopicNames()


DEFAULTS = {
    "group_id": "workers",
    "max_body_bytes": 20_000,
    "max_output_tokens": 64,
    "grace_seconds": 5.0,
    "stream_coalesce_ms": 50,
    "first_token_timeout_ms": 4000,
    "reply_give_up_seconds": 5.0,
}


class Rig:
    """Sends prompts and reads replies; makes workers over one broker."""

    names = NAMES

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.producer = self.broker.producer()

    async def start(self) -> None:
        topics = [*NAMES.all_prompts, NAMES.replies]
        await self.broker.create_topics(*(NewTopic(name, 2) for name in topics))
        stamped = {"message.timestamp.type": "LogAppendTime"}
        await self.broker.create_topics(NewTopic(NAMES.control, 1, stamped), NewTopic(NAMES.dead_letter))
        await self.producer.start()

    def app(
        self, engine: ScriptedEngine | None = None, *, routes: RouteTable | None = None, **changes: object
    ) -> WorkerApp:
        if routes is not None:
            changes["routes"] = routes.routes
        settings = Settings(**{**DEFAULTS, **changes})
        return WorkerApp(settings, self.broker, engine or ScriptedEngine(), SystemClock())

    async def send(self, value: bytes | dict | None, cls: str = "standard", **headers: str | bytes) -> TopicPartition:
        raw = json.dumps(value).encode() if isinstance(value, dict) else value
        wire = tuple(
            (name.replace("_", "-"), text if isinstance(text, bytes) else text.encode())
            for name, text in headers.items()
        )
        return await self.producer.send(NAMES.prompts(cls), raw, headers=wire)

    async def serve_all(self, engine: ScriptedEngine | None = None, **changes: object) -> None:
        async with asyncio.timeout(10):
            await self.app(engine, **changes).run(until_end=True)

    @asynccontextmanager
    async def running(self, app: WorkerApp) -> AsyncIterator[asyncio.Task]:
        task = asyncio.create_task(app.run())
        try:
            yield task
        finally:
            app.request_stop()
            await task

    def replies(self, request_id: str, topic: str = NAMES.replies) -> list[SimpleNamespace]:
        found = []
        for record in self.broker.records(topic):
            headers = dict(record.headers)
            if headers.get("x-request-id") == request_id.encode():
                found.append(SimpleNamespace(body=json.loads(record.value), headers=headers, record=record))
        return found

    def error(self, request_id: str, topic: str = NAMES.replies) -> str:
        (reply,) = self.replies(request_id, topic)
        assert reply.headers["x-final"] == b"1"
        assert reply.headers["x-event"] == b"error"
        return reply.body["error"]["code"]

    def answer(self, request_id: str, topic: str = NAMES.replies) -> str:
        reader = AttemptReader()
        for reply in self.replies(request_id, topic):
            reader.feed(reply.record.headers, reply.record.value, reply.record.offset)
        assert str(reader.state) == "complete", reader.state
        return reader.texts[0]

    async def until_replied(self, request_id: str, num_records: int = 1, topic: str = NAMES.replies) -> None:
        """Returns when this many replies are there; fails the test after ten seconds."""
        reader = self.broker.reader([topic], from_beginning=True)
        await reader.start()
        async with asyncio.timeout(10):
            seen = 0
            while seen < num_records:
                for record in await reader.poll(100, 1.0):
                    seen += dict(record.headers).get("x-request-id") == request_id.encode()
        await reader.stop()

    def dead_letters(self) -> list[Record]:
        return self.broker.records(NAMES.dead_letter)

    async def uncommitted(self) -> dict[TopicPartition, int]:
        """Records of each prompt partition that the group has not committed."""
        left = {}
        group = self.broker._cluster.group("workers")
        for topic in NAMES.all_prompts:
            for partition in range(2):
                tp = TopicPartition(topic, partition)
                end = self.broker._cluster.log(tp).next_offset
                commit = group.offsets.get(tp)
                if end - (commit.offset if commit else 0):
                    left[tp] = end - (commit.offset if commit else 0)
        return left


def chat(text: str = "hello", **more: object) -> dict:
    return {"messages": [{"role": "user", "content": text}], **more}


@pytest.fixture(autouse=True)
def logs_as_they_were():
    """A test that sets the logs up leaves no logger behind that writes to a file which pytest has closed."""
    yield
    structlog.reset_defaults()


@pytest.fixture
async def rig() -> Rig:
    rig = Rig()
    await rig.start()
    return rig


@pytest.fixture
def prompt():
    """Makes the body of a chat request."""
    return chat
