"""A client for services in Python: prompts out, answers in by the attempt rule, any number of them at once."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from engine.api import PriorityClass
from topics.attempts import AttemptEvent, AttemptReader, EventKind
from topics.names import TopicNames
from worker.broker.api import Broker, BrokerError, Record, TopicNotAvailableError
from worker.broker.kafka import KafkaBroker, KafkaConnection
from worker.broker.kafka_security import KafkaSecurity
from worker.cancel import cancel_record
from worker.client.answer import Answer, AnswerChangedError, NoAnswerError
from worker.client.prompt import Prompt

POLL_RECORDS = 200
POLL_SECONDS = 0.25


@dataclass(slots=True)
class _Waiting:
    """One request that is followed, and what its reader has not taken yet."""

    reader: AttemptReader
    events: list[AttemptEvent] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Client:
    """Open within `async with`; one producer and one reader, in place before anything is sent, serve all requests.

    Every method may raise BrokerError. A prompt that nobody follows any more stays with the workers until `cancel`.
    """

    def __init__(self, broker: Broker, names: TopicNames | None = None, *, reply_topic: str | None = None) -> None:
        """`reply_topic` is the shared one when not given; its records may be those of others too."""
        self._names = names or TopicNames()
        self._reply_topic = reply_topic or self._names.replies
        self._reader = broker.reader([self._reply_topic], from_beginning=False)
        self._producer = broker.producer()
        self._waiting: dict[bytes, _Waiting] = {}
        self._failure: BrokerError | None = None
        self._leaving = AsyncExitStack()

    @classmethod
    def connect(cls, bootstrap_servers: str, *, prefix: str = "v4flash", security: KafkaSecurity | None = None) -> Self:
        """A client of the workers below `prefix` on this Kafka; it connects when it is entered."""
        connection = KafkaConnection(bootstrap_servers, security=security or KafkaSecurity())
        return cls(KafkaBroker(connection), TopicNames(prefix))

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as leaving:
            for client in (self._reader, self._producer):
                leaving.push_async_callback(client.stop)
                await client.start()
            tasks = await leaving.enter_async_context(asyncio.TaskGroup())
            leaving.callback(tasks.create_task(self._read()).cancel)
            self._leaving = leaving.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leaving.__aexit__(None, None, None)

    async def events(
        self, prompt: Prompt, reader: AttemptReader | None = None, *, timeout_seconds: float | None = None
    ) -> AsyncGenerator[AttemptEvent]:
        """Send a prompt; yield what to show as it comes, until it is settled; `reader` then knows the whole.

        Raises NoAnswerError after `timeout_seconds`, ValueError for a request id that is followed already."""
        name = prompt.request_id.encode()
        if name in self._waiting:
            raise ValueError(f"request {prompt.request_id} is followed already")
        waiting = self._waiting[name] = _Waiting(reader or AttemptReader())
        try:
            ends = None if timeout_seconds is None else asyncio.get_running_loop().time() + timeout_seconds
            await self._send(prompt)
            while not (waiting.reader.settled and not waiting.events):
                if self._failure is not None:
                    raise self._failure
                try:
                    async with asyncio.timeout_at(ends):  # never around a yield: it would end what the caller does
                        await waiting.news.wait()
                except TimeoutError:
                    raise NoAnswerError(f"not answered within {timeout_seconds:g} s") from None
                waiting.news.clear()
                events, waiting.events = waiting.events, []
                for event in events:
                    yield event
        finally:
            del self._waiting[name]

    async def stream(self, prompt: Prompt, *, timeout_seconds: float | None = None) -> AsyncGenerator[str]:
        """Pieces of the first choice's text as they come. A second attempt goes on where the first one was.

        Raises RequestFailedError, NoAnswerError, and AnswerChangedError where the second attempt says otherwise."""
        reader = AttemptReader()
        given = ""
        async with aclosing(self.events(prompt, reader, timeout_seconds=timeout_seconds)) as events:
            async for event in events:
                if event.kind is not EventKind.TEXT or event.index:
                    continue
                text = reader.text
                if not (text.startswith(given) or given.startswith(text)):
                    raise AnswerChangedError
                if piece := text[len(given) :]:
                    given = text
                    yield piece
        Answer.of(prompt.request_id, reader)

    async def ask(self, prompt: Prompt, *, timeout_seconds: float | None = None) -> Answer:
        """The whole answer. Raises RequestFailedError, NoAnswerError."""
        reader = AttemptReader()
        async with aclosing(self.events(prompt, reader, timeout_seconds=timeout_seconds)) as events:
            async for _ in events:
                pass
        return Answer.of(prompt.request_id, reader)

    async def cancel(
        self, request_id: str, *, tenant: str = "", priority: PriorityClass = PriorityClass.STANDARD
    ) -> None:
        """Ask all workers to stop a request: on the control topic, or where we may not write there, behind the prompts
        of its class, in which case the route says the tenant."""
        key, value = cancel_record(tenant, request_id)
        try:
            await self._producer.send(self._names.control, value, key=key)
        except TopicNotAvailableError:
            named = request_id.encode()
            headers = (("x-request-id", named),)
            await self._producer.send(self._names.prompts(priority), None, key=named, headers=headers)

    async def _send(self, prompt: Prompt) -> None:
        key = prompt.request_id.encode() if prompt.key is None else prompt.key
        headers = prompt.headers(self._reply_topic)
        await self._producer.send(self._names.prompts(prompt.priority), prompt.value(), key=key, headers=headers)

    async def _read(self) -> None:
        try:
            while True:
                for record in await self._reader.poll(POLL_RECORDS, POLL_SECONDS):
                    self._take(record)
        except BrokerError as error:
            self._failure = error
            for waiting in self._waiting.values():
                waiting.news.set()

    def _take(self, record: Record) -> None:
        waiting = self._waiting.get(dict(record.headers).get("x-request-id") or b"")
        if waiting is None:
            return
        events = waiting.reader.feed(record.headers, record.value, record.offset)
        waiting.events += events
        if events:
            waiting.news.set()
