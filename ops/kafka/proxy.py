"""A loopback proxy in front of one Kafka node that reads the API key of every request, so that a drill can keep one
kind of answer from a client, put an error into it, or cut the connection after the broker has acted. Nothing else is
changed."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import TracebackType
from typing import Self

HEADER_BYTES = 8  # api key, api version, correlation id
CORRELATION_BYTES = 4
THROTTLE_BYTES = 4


class ApiKey(IntEnum):
    """The requests that drills are about."""

    PRODUCE = 0
    FETCH = 1
    OFFSET_COMMIT = 8
    JOIN_GROUP = 11
    HEARTBEAT = 12
    SYNC_GROUP = 14


class Action(Enum):
    """WITHHOLD keeps the answer and leaves the connection open; CUT closes it instead of answering; FAIL answers with
    an error although the broker has acted."""

    WITHHOLD = "withhold"
    CUT = "cut"
    FAIL = "fail"


class KafkaError(IntEnum):
    """Errors that drills put into answers."""

    COORDINATOR_LOADING = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    ILLEGAL_GENERATION = 22
    UNKNOWN_MEMBER_ID = 25
    REBALANCE_IN_PROGRESS = 27
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45


@dataclass(slots=True)
class Rule:
    """The first `times` requests of `api_key` whose bytes `matches` accepts. `hit` is set when the broker has answered
    one of them, which is when the client goes without."""

    api_key: ApiKey
    action: Action
    matches: Callable[[bytes], bool] = lambda request: True
    times: int = 1
    error: KafkaError | None = None
    hit: asyncio.Event = field(default_factory=asyncio.Event)
    num_hits: int = 0


class KafkaProxy:
    """Listens on `port` from `async with` until its end. The broker has to advertise this port, or clients go round."""

    def __init__(self, port: int, host: str, broker_port: int) -> None:
        self.port = port
        self._broker = (host, broker_port)
        self._rules: list[Rule] = []
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()

    def rule(
        self,
        api_key: ApiKey,
        action: Action,
        *,
        containing: bytes = b"",
        times: int = 1,
        error: KafkaError | None = None,
    ) -> Rule:
        """From now on; `containing` must stand in the request as it is (our producers do not compress). FAIL needs an
        `error`, and FETCH cannot be failed."""
        rule = Rule(api_key, action, lambda request: containing in request, times, error)
        self._rules.append(rule)
        return rule

    def clear(self) -> None:
        self._rules.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_connection(*self._broker)
        except OSError:
            writer.transport.abort()
            return
        struck: dict[int, Rule] = {}
        self._writers |= {writer, upstream[1]}
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._requests(reader, upstream[1], struck))
                both.create_task(self._responses(upstream[0], writer, struck))
        except* (OSError, EOFError):
            pass
        finally:
            for end in (writer, upstream[1]):
                end.transport.abort()
                self._writers.discard(end)

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, struck: dict[int, Rule]
    ) -> None:
        while True:
            frame = await _frame(reader)
            if (rule := self._rule_for(frame)) is not None:
                struck[int.from_bytes(frame[4:HEADER_BYTES], "big")] = rule
            writer.write(len(frame).to_bytes(4, "big") + frame)
            await writer.drain()

    async def _responses(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, struck: dict[int, Rule]
    ) -> None:
        while True:
            frame = await _frame(reader)
            rule = struck.pop(int.from_bytes(frame[:4], "big"), None)
            if rule is None:
                writer.write(len(frame).to_bytes(4, "big") + frame)
                await writer.drain()
                continue
            rule.hit.set()
            if rule.action is Action.CUT:
                raise EOFError
            if rule.action is Action.FAIL:
                assert rule.error is not None
                frame = failed(frame, rule.api_key, rule.error)
                writer.write(len(frame).to_bytes(4, "big") + frame)
                await writer.drain()

    def _rule_for(self, frame: bytes) -> Rule | None:
        key = int.from_bytes(frame[:2], "big")
        for rule in self._rules:
            if rule.api_key == key and rule.num_hits < rule.times and rule.matches(frame):
                rule.num_hits += 1
                return rule
        return None


def failed(response: bytes, api_key: ApiKey, error: KafkaError) -> bytes:
    """The response with this error in place of each of its own. Layouts of the versions before tagged fields, which
    aiokafka speaks: see Kafka's protocol guide."""
    changed = bytearray(response)
    for at in _errors_at(response, api_key):
        changed[at : at + 2] = error.to_bytes(2, "big")
    return bytes(changed)


def _errors_at(response: bytes, api_key: ApiKey) -> Iterator[int]:
    if api_key not in (ApiKey.PRODUCE, ApiKey.OFFSET_COMMIT):
        yield CORRELATION_BYTES + THROTTLE_BYTES
        return
    # the fields of a partition after its number and its error: Produce's are offset, timestamp, log start, a list of
    # record errors and a message, which a partition that went well leaves empty
    rest = 0 if api_key is ApiKey.OFFSET_COMMIT else 8 + 8 + 8 + 4 + 2
    at = CORRELATION_BYTES + (THROTTLE_BYTES if api_key is ApiKey.OFFSET_COMMIT else 0)
    num_topics, at = int.from_bytes(response[at : at + 4], "big"), at + 4
    for _ in range(num_topics):
        at += 2 + int.from_bytes(response[at : at + 2], "big")
        num_partitions, at = int.from_bytes(response[at : at + 4], "big"), at + 4
        for _ in range(num_partitions):
            yield at + 4
            at += 6 + rest


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """Raises IncompleteReadError, an EOFError, at the end of the connection."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    return await reader.readexactly(size)


__all__ = ["Action", "ApiKey", "KafkaError", "KafkaProxy", "Rule", "failed"]
