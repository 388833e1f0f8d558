"""`--until-end` on a real Kafka whose partitions end in offsets that no poll brings."""

import asyncio
import json

import pytest
from aiokafka import AIOKafkaProducer

from engine.scripted import ScriptedEngine
from topics.names import TopicNames
from topics.routes import Route
from worker.app import WorkerApp
from worker.broker.api import NewTopic
from worker.broker.kafka import KafkaBroker
from worker.broker.kafka_connection import KafkaConnection
from worker.clock import SystemClock
from worker.provision import create_topics, topics_of
from worker.settings import Settings


@pytest.mark.kafka
@pytest.mark.timeout(60)
async def test_until_end_passes_the_markers_of_transactions_and_follows_a_pattern(kafka_bootstrap: str) -> None:
    """One prompt is committed by a transaction and one aborted: the first is answered, the worker ends by itself."""
    names = TopicNames("until-end")
    broker = KafkaBroker(KafkaConnection(kafka_bootstrap))
    await create_topics(
        broker.admin(), [*topics_of(names, max_body_bytes=1_000_000, num_partitions=2), NewTopic("until-end-acme")]
    )
    producer = AIOKafkaProducer(bootstrap_servers=kafka_bootstrap, transactional_id="until-end")
    await producer.start()
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    async with producer.transaction():
        await producer.send("until-end-acme", body, headers=[("x-request-id", b"kept")])
        await producer.send(names.prompts("bulk"), body, partition=1, headers=[("x-request-id", b"kept too")])
    await producer.begin_transaction()
    await producer.send_and_wait(names.prompts("bulk"), body, partition=0, headers=[("x-request-id", b"aborted")])
    await producer.abort_transaction()
    await producer.stop()
    routes = (Route(topics=names.all_prompts), Route(pattern="until-end-[a-z]+"))
    settings = Settings(prefix=names.prefix, group_id=names.prefix, bootstrap_servers=kafka_bootstrap, routes=routes)
    async with asyncio.timeout(40):
        await WorkerApp(settings, broker, ScriptedEngine(), SystemClock()).run(until_end=True)
    reader = broker.reader([names.replies], from_beginning=True)
    await reader.start()
    answered = set()
    while not await reader.at_end():
        answered |= {dict(record.headers)["x-request-id"] for record in await reader.poll(10, 0.5)}
    await reader.stop()
    assert answered == {b"kept", b"kept too"}
