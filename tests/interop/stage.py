"""Topics, worker processes and all clients of one run, on a real Kafka."""

import asyncio
import json
import subprocess
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from aiokafka import AIOKafkaConsumer, TopicPartition
from broker import free_ports
from clients import CLIENTS
from conversation import Conversation, Outcome
from workers import Workers

from topics.names import TopicNames
from worker.broker.api import NewTopic
from worker.broker.kafka import KafkaBroker
from worker.broker.kafka_connection import KafkaConnection
from worker.provision import DEFAULT_PARTITIONS, create_topics, topics_of
from worker.settings import Settings

FAST, SLOW = 2000.0, 2.0
WAIT_SECONDS = 40.0
TYPE_HEADER = {"__TypeId__": "completion"}


class Stage:
    """`serve` starts a worker where none runs; `ask_all` puts one question to every client at once."""

    def __init__(self, bootstrap_servers: str, folder: Path, names: list[str]) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.topics = TopicNames(f"i{uuid.uuid4().hex[:8]}")
        self.standard, self.nest_replies = self.topics.prompts("standard"), f"{self.topics.prompts('standard')}.reply"
        self.typed, self.typed_replies = f"{self.topics.prefix}.typed", f"{self.topics.replies}.typed"
        self.workers = Workers(self.topics.prefix, folder)
        self._worker: subprocess.Popen[bytes] | None = None
        self._metrics = ""
        self._create_topics()
        env = {
            "BOOTSTRAP_SERVERS": bootstrap_servers,
            "PROMPTS": self.standard,
            "TYPED_PROMPTS": self.typed,
            "TYPED_REPLIES": self.typed_replies,
            "REPLIES": self.topics.replies,
        }
        self.conversations = {name: Conversation(name, CLIENTS[name], env, folder) for name in names}

    def until_ready(self) -> None:
        for conversation in self.conversations.values():
            conversation.until_ready()

    def serve(self, tokens_per_second: float = FAST) -> None:
        if self._worker is None:
            (port,) = free_ports(1)
            self._metrics = f"http://127.0.0.1:{port}/metrics"
            self._worker = self.workers.start(
                self.bootstrap_servers,
                metrics_port=port,
                routes=self._routes(),
                scripted_tokens_per_second=tokens_per_second,
            )

    def stop_serving(self) -> None:
        if self._worker is not None:
            assert asyncio.run(self.workers.end(self._worker)) == 0
            self._worker = None

    def kill_worker(self) -> None:
        assert self._worker is not None
        asyncio.run(self.workers.kill(self._worker))
        self._worker = None

    def ask_all(self, question: str) -> dict[str, str]:
        """Every client asks; which question by client."""
        asked = {name: f"{question} for {name}" for name in self.conversations}
        for name, conversation in self.conversations.items():
            conversation.ask(asked[name])
        return asked

    def outcomes(self) -> dict[str, Outcome]:
        return {name: conversation.outcome() for name, conversation in self.conversations.items()}

    def until_running(self, count: int) -> None:
        """The worker generates so many answers at once."""
        ends = time.monotonic() + WAIT_SECONDS
        while (running := self._gauge("v4flash_requests_running")) < count:
            assert time.monotonic() < ends, f"{running} of {count} are running"
            time.sleep(0.05)

    def rewind(self) -> None:
        """While no worker runs: the group forgets that it has done anything."""
        asyncio.run(self._commit_zero())

    def until_all_done(self) -> None:
        """The group has committed every prompt that there is."""
        asyncio.run(self._until_committed())

    def num_replies(self) -> Counter[str]:
        """Records on each reply topic."""
        return asyncio.run(self._count([self.topics.replies, self.nest_replies, self.typed_replies]))

    def until_streaming(self, before: Counter[str]) -> None:
        """Each client that streams has the beginning of an answer."""
        streaming = {"nestjs-stream": self.nest_replies, "confluent-kafka": self.topics.replies}
        topics = [topic for name, topic in streaming.items() if name in self.conversations]
        ends = time.monotonic() + WAIT_SECONDS
        while any((now := self.num_replies())[topic] < before[topic] + 2 for topic in topics):
            assert time.monotonic() < ends, f"no streams: {now - before}"
            time.sleep(0.05)

    def stop(self) -> None:
        for conversation in self.conversations.values():
            conversation.stop()
        self.workers.stop()

    def _create_topics(self) -> None:
        admin = KafkaBroker(KafkaConnection(self.bootstrap_servers)).admin()
        own = topics_of(self.topics, max_body_bytes=Settings().max_body_bytes)
        more = [NewTopic(name, DEFAULT_PARTITIONS) for name in (self.nest_replies, self.typed, self.typed_replies)]
        asyncio.run(create_topics(admin, own + more))
        self.num_replies()  # their leaders are known from here on: librdkafka does not wait for them

    def _routes(self) -> str:
        plain = [{"topics": [self.topics.prompts(cls)], "priority": cls} for cls in ("urgent", "standard", "bulk")]
        typed = {"topics": [self.typed], "output_topic": self.typed_replies, "reply_headers": TYPE_HEADER}
        return json.dumps([*plain, typed])

    def _gauge(self, name: str) -> float:
        try:
            with urllib.request.urlopen(self._metrics, timeout=1) as page:
                lines = page.read().decode().splitlines()
        except OSError:
            return 0.0  # it is starting
        return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def _prompt_partitions(self) -> list[TopicPartition]:
        return [TopicPartition(topic, p) for topic in (self.standard, self.typed) for p in range(DEFAULT_PARTITIONS)]

    async def _commit_zero(self) -> None:
        async with self._consumer() as consumer:
            partitions = self._prompt_partitions()
            consumer.assign(partitions)
            await consumer.commit(dict.fromkeys(partitions, 0))

    async def _until_committed(self) -> None:
        partitions, ends = self._prompt_partitions(), time.monotonic() + WAIT_SECONDS
        async with self._consumer() as consumer:
            while True:
                log_ends: Mapping[TopicPartition, int] = await consumer.end_offsets(partitions)
                behind = [tp for tp in partitions if (await consumer.committed(tp) or 0) < log_ends[tp]]
                if not behind:
                    return
                assert time.monotonic() < ends, f"not committed: {behind}"
                await asyncio.sleep(0.1)

    async def _count(self, topics: list[str]) -> Counter[str]:
        found: Counter[str] = Counter()
        async with self._consumer() as consumer:
            partitions = [TopicPartition(topic, number) for topic in topics for number in range(DEFAULT_PARTITIONS)]
            for tp, end in (await consumer.end_offsets(partitions)).items():
                found[tp.topic] += end
        return found

    def _consumer(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap_servers, group_id=self.topics.prefix, enable_auto_commit=False
        )
