"""The oracle of a drill, outside the system: what the client had acknowledged, what it read, what was committed."""

import asyncio
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as KafkaTopicPartition

from engine.api import ChatMessage
from engine.scripted import ScriptedEngine, scripted_answer
from topics.attempts import AttemptReader, AttemptState
from topics.names import TopicNames
from worker.broker.api import OffsetCommit, Record, TopicPartition
from worker.broker.kafka import KafkaBroker
from worker.broker.kafka_admin import KafkaAdmin
from worker.broker.kafka_connection import KafkaConnection

MAX_TOKENS = 400
AT_ONCE = 500


@dataclass(slots=True)
class Entry:
    """One acknowledged prompt, and what came back. `error` is the code of the error that is its right answer."""

    expected: str | None
    where: TopicPartition
    offset: int
    error: str | None = None
    answer: AttemptReader = field(default_factory=AttemptReader)
    attempts: list[bytes] = field(default_factory=list)
    ended: list[bytes] = field(default_factory=list)
    sent_at: float = field(default_factory=time.monotonic)
    last_at: float | None = None
    longest_silence: float = 0.0
    settled_at: float | None = None

    @property
    def streaming(self) -> bool:
        return bool(self.attempts) and not self.answer.settled

    @property
    def right(self) -> bool:
        if self.error is not None:
            return self.answer.state is AttemptState.ERROR and (self.answer.error or {}).get("code") == self.error
        complete = self.answer.state is AttemptState.COMPLETE
        return complete and (bool(self.answer.text) if self.expected is None else self.answer.text == self.expected)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    fault: str
    num_sent: int
    num_right: int
    num_duplicates: int
    num_lost: int
    recovery_seconds: float


class Ledger:
    """Sends prompts and reads every reply of one prefix, over connections of its own straight to the broker.

    With `any_text`, for models whose answers are not known beforehand, a complete answer that is not empty is right.
    """

    def __init__(
        self, bootstrap_servers: str, prefix: str, *, any_text: bool = False, max_tokens: int = MAX_TOKENS
    ) -> None:
        self._any_text = any_text
        self._max_tokens = max_tokens
        self.names = TopicNames(prefix)
        self._bootstrap_servers = bootstrap_servers
        connection = KafkaConnection(bootstrap_servers, metadata_max_age_seconds=3.0, request_timeout_seconds=30.0)
        self.broker = KafkaBroker(connection)
        self.entries: dict[str, Entry] = {}
        self.errors: dict[str, str] = {}
        self.commits: list[dict[TopicPartition, int]] = []
        self.fault_at: float | None = None
        self.num_open_at_fault = self.num_unknown_replies = 0
        self.num_partitions = 12
        self._num_sent = 0
        self._admin = KafkaAdmin(connection)
        self._producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap_servers, enable_idempotence=True, metadata_max_age_ms=3000
        )
        self._reader = self.broker.reader([self.names.replies], from_beginning=True)
        self._engine = ScriptedEngine()

    async def start(self) -> None:
        for client in (self._admin, self._producer, self._reader):
            await client.start()

    async def stop(self) -> None:
        for client in (self._admin, self._producer, self._reader):
            await client.stop()

    async def send(
        self,
        count: int,
        text: str,
        *,
        mode: str = "chunks",
        cls: str = "standard",
        error: str | None = None,
        at_once: int = AT_ONCE,
        **headers: str,
    ) -> list[str]:
        """Send `count` prompts and note each when the broker has it; their ids. Headers are named with underscores."""
        named = {"x-reply-mode": mode} | {name.replace("_", "-"): value for name, value in headers.items()}
        sent: list[str] = []
        while len(sent) < count:
            first = self._num_sent
            self._num_sent += min(at_once, count - len(sent))
            made = [
                self._send(index, f"{text} number {index}", cls, named, error) for index in range(first, self._num_sent)
            ]
            self.entries.update(found := await asyncio.gather(*made))
            sent += [request_id for request_id, _ in found]
        return sent

    async def _send(
        self, index: int, words: str, cls: str, more: dict[str, str], error: str | None
    ) -> "tuple[str, Entry]":
        request_id = f"r{index}"
        ids = self._engine.encode_chat([ChatMessage("user", words)])
        body = json.dumps({"messages": [{"role": "user", "content": words}], "max_tokens": self._max_tokens}).encode()
        wire = [(name, value.encode()) for name, value in {"x-request-id": request_id, **more}.items()]
        where = TopicPartition(self.names.prompts(cls), index % self.num_partitions)
        sent = await self._producer.send_and_wait(
            where.topic, body, key=request_id.encode(), headers=wire, partition=where.partition
        )
        expected = None if self._any_text else scripted_answer(ids, self._max_tokens)
        return request_id, Entry(expected, where, sent.offset, error)

    def drop(self, request_ids: Collection[str]) -> None:
        """The broker has lost these on purpose: nobody can answer them."""
        for request_id in request_ids:
            del self.entries[request_id]

    async def send_unread(self, count: int, text: str, reply_topic: str) -> int:
        """Send prompts whose replies go where this ledger does not read; how many."""
        topic = self.names.prompts("standard")
        body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": MAX_TOKENS}).encode()
        for index in range(count):
            named = {"x-request-id": f"u{index}", "x-reply-mode": "chunks", "x-reply-topic": reply_topic}
            headers = [(name, value.encode()) for name, value in named.items()]
            await self._producer.send_and_wait(topic, body, headers=headers, partition=index)
        return count

    async def until_dead_letters(self, count: int, *, seconds: float) -> None:
        """So many requests are on the dead-letter topic."""
        reader = self.broker.reader([self.names.dead_letter], from_beginning=True)
        await reader.start()
        found: set[bytes | None] = set()
        ends = time.monotonic() + seconds
        while len(found) < count:
            assert time.monotonic() < ends, f"{len(found)} of {count} dead letters within {seconds} s"
            found |= {dict(record.headers).get("x-request-id") for record in await reader.poll(100, 0.5)}
        await reader.stop()

    async def read(self, seconds: float = 0.2) -> None:
        """Take in the replies that come within this time."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            for record in await self._reader.poll(500, left):
                self._take(record)

    async def until(self, condition: Callable[[], bool], *, seconds: float, what: str) -> None:
        """Read until it holds; fails the drill when it does not in time."""
        ends = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < ends, f"{what}: not within {seconds} s; {self}"
            await self.read()

    async def until_settled(self, *, seconds: float = 180.0) -> None:
        await self.until(
            lambda: all(entry.answer.settled for entry in self.entries.values()), seconds=seconds, what="all answered"
        )

    async def until_streaming(self, count: int, *, seconds: float = 90.0) -> None:
        await self.until(lambda: self.num_streaming >= count, seconds=seconds, what=f"{count} streams open")

    @property
    def num_streaming(self) -> int:
        return sum(entry.streaming for entry in self.entries.values())

    def fault(self) -> None:
        """It happens now."""
        self.fault_at = time.monotonic()
        self.num_open_at_fault = sum(not entry.answer.settled for entry in self.entries.values())
        self._open = [entry for entry in self.entries.values() if not entry.answer.settled]

    async def commit(self, tp: TopicPartition, offset: int, metadata: str) -> None:
        """Write what the group has committed, as a tool or another version would; nobody may be in the group."""
        consumer = AIOKafkaConsumer(bootstrap_servers=self._bootstrap_servers, group_id=self.names.prefix)
        await consumer.start()
        consumer.assign([KafkaTopicPartition(*tp)])
        await consumer.commit({KafkaTopicPartition(*tp): (offset, metadata)})
        await consumer.stop()

    async def commit_of(self, tp: TopicPartition) -> OffsetCommit | None:
        """What the group has committed of one partition."""
        return (await self._admin.committed(self.names.prefix, [tp]))[tp]

    async def committed(self) -> dict[TopicPartition, int]:
        """What the group has committed now; the history must never go back."""
        tps = sorted({entry.where for entry in self.entries.values()})
        found = await self._admin.committed(self.names.prefix, tps)
        now = {tp: commit.offset for tp, commit in found.items() if commit is not None}
        self.commits.append(now)
        return now

    async def until_committed(self, *, seconds: float = 60.0) -> None:
        """Every acknowledged prompt lies before the committed offset of its partition."""
        ends = time.monotonic() + seconds
        while True:
            now = await self.committed()
            if all(now.get(entry.where, 0) > entry.offset for entry in self.entries.values()):
                return
            assert time.monotonic() < ends, f"commits stay behind: {self.commits[-1]}"
            await asyncio.sleep(0.2)

    @property
    def num_settled(self) -> int:
        return sum(entry.answer.settled for entry in self.entries.values())

    @property
    def num_twice(self) -> int:
        """Prompts with more than one attempt."""
        return sum(len(entry.attempts) > 1 for entry in self.entries.values())

    def row(self, fault: str) -> Row:
        """The drill's line. Raises AssertionError for a commit that went back or passed what was unanswered."""
        for before, after in zip(self.commits, self.commits[1:], strict=False):
            assert all(after.get(tp, 0) >= offset for tp, offset in before.items()), "a committed offset went back"
        entries = self.entries.values()
        assert self.fault_at is not None, "no fault was injected"
        times = [entry.settled_at - self.fault_at for entry in self._open if entry.settled_at is not None]
        return Row(
            fault,
            len(entries),
            sum(entry.right for entry in entries),
            sum(len(entry.ended) > 1 for entry in entries),
            sum(not entry.answer.settled for entry in entries),
            max(times, default=0.0),
        )

    def __repr__(self) -> str:
        return f"Ledger(sent={len(self.entries)}, settled={self.num_settled}, streaming={self.num_streaming})"

    def _take(self, record: Record) -> None:
        headers = dict(record.headers)
        entry = self.entries.get((headers.get("x-request-id") or b"").decode())
        if entry is None:
            self.num_unknown_replies += 1
            return
        attempt = headers.get("x-attempt") or b""
        if attempt not in entry.attempts:
            entry.attempts.append(attempt)
        if headers.get("x-final") == b"1" and attempt not in entry.ended:
            entry.ended.append(attempt)
        now = time.monotonic()
        if entry.last_at is not None and not entry.answer.settled:
            entry.longest_silence = max(entry.longest_silence, now - entry.last_at)
        entry.last_at = now
        entry.answer.feed(record.headers, record.value, record.offset)
        if entry.answer.settled and entry.settled_at is None:
            entry.settled_at = now
