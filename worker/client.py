"""A small client: sends one prompt and follows its answer on the shared reply topic by the attempt rule."""

import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from engine.api import PriorityClass
from topics.attempts import AttemptEvent, AttemptReader
from topics.names import TopicNames
from worker.broker.api import Broker, Headers
from worker.cancel import cancel_record
from worker.errors import WorkerError

POLL_RECORDS = 200
POLL_SECONDS = 0.25


class NoAnswerError(WorkerError):
    """The answers did not all come within the time limit."""

    code = "no_answer"
    retriable = True


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message, and how it is to be answered."""

    text: str
    priority: PriorityClass = PriorityClass.STANDARD
    max_tokens: int = 128
    temperature: float = 0.0
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def value(self) -> bytes:
        """The record's value: an OpenAI chat body that asks for chunks."""
        body = {
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        return json.dumps(body, ensure_ascii=False).encode()

    def headers(self, names: TopicNames) -> Headers:
        return (
            ("x-request-id", self.request_id.encode()),
            ("x-correlation-id", self.request_id.encode()),
            ("x-reply-topic", names.replies.encode()),
        )


async def ask_all(
    broker: Broker,
    names: TopicNames,
    asked: Sequence[tuple[Prompt, AttemptReader]],
    *,
    timeout_seconds: float | None = None,
) -> AsyncGenerator[tuple[str, AttemptEvent]]:
    """Send prompts; yield (request id, what to show) as records come, until all are settled. Raises BrokerError.

    One reader serves all of them, in place before anything is sent, so no record is missed. Waits as long as it takes,
    or raises NoAnswerError when `timeout_seconds` have passed since the prompts were sent; they stay with the workers.
    """
    reader, producer = broker.reader([names.replies], from_beginning=False), broker.producer()
    answers = {prompt.request_id.encode(): answer for prompt, answer in asked}
    try:
        await reader.start()
        await producer.start()
        for prompt, _ in asked:
            topic, key = names.prompts(prompt.priority), prompt.request_id.encode()
            await producer.send(topic, prompt.value(), key=key, headers=prompt.headers(names))
        ends = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while waiting := sum(not answer.settled for answer in answers.values()):
            if (left := ends - time.monotonic()) <= 0:
                raise NoAnswerError(f"{waiting} of {len(asked)} not answered within {timeout_seconds:g} s")
            for record in await reader.poll(POLL_RECORDS, min(POLL_SECONDS, left)):
                request_id = dict(record.headers).get("x-request-id") or b""
                if request_id in answers:
                    for event in answers[request_id].feed(record.headers, record.value, record.offset):
                        yield request_id.decode(), event
    finally:
        await producer.stop()
        await reader.stop()


async def ask(
    broker: Broker,
    names: TopicNames,
    prompt: Prompt,
    answer: AttemptReader,
    *,
    timeout_seconds: float | None = None,
) -> AsyncGenerator[AttemptEvent]:
    """`ask_all` for one prompt."""
    async with aclosing(ask_all(broker, names, [(prompt, answer)], timeout_seconds=timeout_seconds)) as events:
        async for _, event in events:
            yield event


async def cancel(broker: Broker, names: TopicNames, request_id: str, *, tenant: str = "") -> None:
    """Ask all workers to stop a request. Raises BrokerError."""
    producer = broker.producer()
    try:
        await producer.start()
        key, value = cancel_record(tenant, request_id)
        await producer.send(names.control, value, key=key)
    finally:
        await producer.stop()
