"""The line between the supervisor and its child: messages as lines of JSON over a pair of sockets."""

import asyncio
import json
import socket
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Self

from worker.broker.api import TopicPartition
from worker.lease import Answered

MAX_LINE_BYTES = 16 * 1024 * 1024

Message = Mapping[str, Any]


class Kind(StrEnum):
    """What a message says. The first group is the child's, the second the supervisor's, DONE is both's."""

    LOADED = "loaded"
    SERVING = "serving"
    HANDED_OVER = "handed_over"
    ANSWER = "answer"

    JOIN = "join"
    HAND_OVER = "hand_over"
    RELEASED = "released"
    STOP = "stop"
    ASK = "ask"

    DONE = "done"


class Link:
    """One end. What is sent is buffered; messages arrive in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> Self:
        """Takes the socket over."""
        return cls(*await asyncio.open_unix_connection(sock=sock, limit=MAX_LINE_BYTES))

    def send(self, kind: Kind, **fields: Any) -> None:
        """Lost, without a word, when the other end has gone."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    async def receive(self) -> Message | None:
        """The next message, None when the other end has gone."""
        try:
            line = await self._reader.readuntil(b"\n")
        except (asyncio.IncompleteReadError, OSError):
            return None
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        self._writer.close()


def as_fields(prompts: Iterable[Answered]) -> list[list[Any]]:
    """Prompts as a message carries them."""
    return [[*prompt.tp, prompt.offset, prompt.timestamp_ms] for prompt in prompts]


def from_fields(fields: Iterable[Iterable[Any]]) -> list[Answered]:
    """Prompts that a message names."""
    return [
        Answered(TopicPartition(topic, partition), offset, timestamp_ms)
        for topic, partition, offset, timestamp_ms in fields
    ]
