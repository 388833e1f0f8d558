"""A prompt topic that the broker compacts under its worker: offsets are gone, and nothing waits for them."""

import asyncio
import json

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as KafkaTopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from engine.scripted import ScriptedEngine
from topics.names import TopicNames
from topics.routes import Route
from worker.app import WorkerApp
from worker.broker.api import NewTopic, TopicPartition
from worker.broker.kafka import KafkaBroker
from worker.broker.kafka_connection import KafkaConnection
from worker.clock import SystemClock
from worker.commit_metadata import CommitMetadata, Mark, MarkState, MetadataCodec
from worker.provision import create_topics, topics_of
from worker.settings import Settings

NAMES = TopicNames("compacted")
TOPIC = "compacted-prompts"
BROKER_ID = "1"
COMPACT = {
    "cleanup.policy": "compact",
    "segment.ms": "50",
    "min.cleanable.dirty.ratio": "0.001",
    "max.compaction.lag.ms": "100",
}


async def offsets_left(bootstrap: str) -> list[int]:
    """Of the records that the topic still has."""
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap) as consumer:
        (tp,) = partitions = [KafkaTopicPartition(TOPIC, 0)]
        consumer.assign(partitions)
        await consumer.seek_to_beginning(tp)
        end, found = (await consumer.end_offsets(partitions))[tp], []
        while not found or found[-1] < end - 1:
            for record in (await consumer.getmany(tp, timeout_ms=2000))[tp]:
                found.append(record.offset)
        return found


async def send_until_compacted(bootstrap: str) -> list[int]:
    """One key again and again; what was committed, leased and marked of it by an owner that vanished is taken away."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer, asyncio.timeout(60):
        for _ in range(6):
            await producer.send_and_wait(TOPIC, body, key=b"same")
        while (left := await offsets_left(bootstrap))[0] < 5:
            await asyncio.sleep(0.2)
            await producer.send_and_wait(TOPIC, body, key=b"same")  # closes the segment before it
        return left


async def commit_of_a_vanished_owner(bootstrap: str, cluster_id: str) -> None:
    codec, tp = MetadataCodec(), TopicPartition(TOPIC, 0)
    codec.bind(cluster_id)
    said = CommitMetadata(frozenset({3}), {2: 1 << 42}, {1: Mark(MarkState.TOGETHER, 0, 5)})
    async with AIOKafkaConsumer(
        bootstrap_servers=bootstrap, group_id=NAMES.prefix, enable_auto_commit=False
    ) as consumer:
        foreign = KafkaTopicPartition(*tp)
        consumer.assign([foreign])
        await consumer.commit({foreign: (1, codec.encode(tp, 1, said))})


@pytest.mark.kafka
@pytest.mark.timeout(120)
async def test_offsets_that_were_compacted_away_hold_nothing_up(kafka_bootstrap: str) -> None:
    """The committed offset, one that was done, one leased and one marked are gone: what is left is answered once, and
    the commit passes it all."""
    broker = KafkaBroker(KafkaConnection(kafka_bootstrap))
    topics = [*topics_of(NAMES, max_body_bytes=1_000_000, num_partitions=1), NewTopic(TOPIC, 1, COMPACT)]
    await create_topics(broker.admin(), topics)
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_bootstrap)
    await admin.start()
    often = ConfigResource(ConfigResourceType.BROKER, BROKER_ID, configs={"log.cleaner.backoff.ms": "100"})
    await admin.alter_configs([often])
    await admin.close()
    ours = broker.admin()
    await ours.start()
    cluster_id = await ours.cluster_id()
    await ours.stop()
    left = await send_until_compacted(kafka_bootstrap)
    await commit_of_a_vanished_owner(kafka_bootstrap, cluster_id)
    settings = Settings(
        prefix=NAMES.prefix,
        group_id=NAMES.prefix,
        bootstrap_servers=kafka_bootstrap,
        routes=(Route(topics=(TOPIC,)),),
    )
    async with asyncio.timeout(40):
        await WorkerApp(settings, broker, ScriptedEngine(), SystemClock()).run(until_end=True)
    reader = broker.reader([NAMES.replies], from_beginning=True)
    await reader.start()
    answered = []
    while not await reader.at_end():
        answered += [dict(record.headers)["x-request-id"] for record in await reader.poll(100, 0.5)]
    await reader.stop()
    left_after = await offsets_left(kafka_bootstrap)  # the broker may have taken more away meanwhile
    assert len(set(answered)) == len(answered)
    assert {f"{TOPIC}-0-{offset}".encode() for offset in left_after} <= set(answered)
    assert set(answered) <= {f"{TOPIC}-0-{offset}".encode() for offset in left}
    async with AIOKafkaConsumer(bootstrap_servers=kafka_bootstrap, group_id=NAMES.prefix) as consumer:
        assert await consumer.committed(KafkaTopicPartition(TOPIC, 0)) == left[-1] + 1
