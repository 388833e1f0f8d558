"""A prompt topic whose last offset is the marker of a transaction."""

import asyncio
import json

import pytest
from aiokafka import AIOKafkaProducer

from engine.scripted import ScriptedEngine
from topics.names import TopicNames
from worker.app import WorkerApp
from worker.broker.api import TopicPartition
from worker.broker.kafka import KafkaBroker
from worker.broker.kafka_connection import KafkaConnection
from worker.clock import SystemClock
from worker.provision import create_topics, topics_of
from worker.settings import Settings

NAMES = TopicNames("transactions")


@pytest.mark.kafka
@pytest.mark.timeout(120)
async def test_the_markers_of_transactions_are_committed_and_no_lag(kafka_bootstrap: str) -> None:
    """One that was committed and one that was aborted: the prompt of the first is answered, and nothing is left."""
    broker, topic = KafkaBroker(KafkaConnection(kafka_bootstrap)), NAMES.prompts("standard")
    admin = broker.admin()
    await create_topics(admin, topics_of(NAMES, max_body_bytes=1_000_000, num_partitions=1))
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    async with AIOKafkaProducer(bootstrap_servers=kafka_bootstrap, transactional_id=NAMES.prefix) as producer:
        async with producer.transaction():
            await producer.send_and_wait(topic, body, partition=0)
        await producer.begin_transaction()
        await producer.send_and_wait(topic, body, partition=0)
        await producer.abort_transaction()
    settings = Settings(prefix=NAMES.prefix, group_id=NAMES.prefix, bootstrap_servers=kafka_bootstrap)
    async with asyncio.timeout(40):
        await WorkerApp(settings, broker, ScriptedEngine(), SystemClock()).run(until_end=True)
    await admin.start()
    tp = TopicPartition(topic, 0)
    commit = (await admin.committed(NAMES.prefix, [tp]))[tp]
    await admin.stop()
    assert commit is not None
    assert commit.offset == 4  # prompt, marker, prompt that was taken back, marker
