"""What a commit carries and what dead letters say, on a real Kafka."""

import asyncio
import json

import pytest

from engine.scripted import ScriptedEngine
from topics.names import TopicNames
from worker.app import WorkerApp
from worker.broker.kafka import KafkaBroker
from worker.broker.kafka_connection import KafkaConnection
from worker.cli import main
from worker.clock import SystemClock
from worker.commit_metadata import MetadataCodec
from worker.provision import create_topics, topics_of
from worker.settings import Settings


async def answered(broker: KafkaBroker, names: TopicNames) -> list[tuple[str, str]]:
    """Request id and event of every terminal reply."""
    reader, found = broker.reader([names.replies], from_beginning=True), []
    await reader.start()
    while not await reader.at_end():
        for record in await reader.poll(100, 0.5):
            headers = {name: (value or b"").decode() for name, value in record.headers}
            if headers.get("x-final"):
                found.append((headers["x-request-id"], headers["x-event"]))
    await reader.stop()
    return sorted(found)


@pytest.mark.kafka
@pytest.mark.timeout(90)
async def test_a_restart_and_a_replay_on_kafka(kafka_bootstrap: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One slow prompt is aborted at a stop: the done-set survives in Kafka's commit and nothing else is repeated. The
    bad one among them is listed, shown and replayed by the commands."""
    names, broker = TopicNames("delivery"), KafkaBroker(KafkaConnection(kafka_bootstrap))
    await create_topics(broker.admin(), topics_of(names, max_body_bytes=1_000_000, num_partitions=1))
    settings = Settings(prefix=names.prefix, group_id=names.prefix, bootstrap_servers=kafka_bootstrap, grace_seconds=2)
    producer, admin = broker.producer(), broker.admin()
    await producer.start()
    await admin.start()
    texts = {"slow": "[[slow]] [[tokens=200]]", "bad": "", **{f"r{i}": f"prompt {i}" for i in range(6)}}
    for request_id, text in texts.items():
        body = {"messages": [{"role": "user", "content": text}], **({"max_tokens": 0} if request_id == "bad" else {})}
        headers = (("x-request-id", request_id.encode()),)
        tp = await producer.send(names.prompts("bulk"), json.dumps(body).encode(), headers=headers)
    app = WorkerApp(settings, broker, ScriptedEngine(), SystemClock())
    running = asyncio.create_task(app.run())
    async with asyncio.timeout(40):
        while len(await answered(broker, names)) < 7:
            assert not running.done()
    app.request_stop()
    await running
    codec = MetadataCodec()
    codec.bind(await admin.cluster_id())
    commit = (await admin.committed(names.prefix, [tp]))[tp]
    assert commit is not None
    assert commit.offset == 0
    assert codec.decode(tp, commit.metadata, base=0, end=8).done == frozenset(range(1, 8))
    assert codec.decode(tp, commit.metadata, base=0, end=8).marks == {}
    async with asyncio.timeout(40):
        await WorkerApp(settings, broker, ScriptedEngine(), SystemClock()).run(until_end=True)
    expected = sorted([("slow", "final"), ("bad", "error"), *((f"r{i}", "final") for i in range(6))])
    assert await answered(broker, names) == expected

    def command(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["dead-letter", *words, "--bootstrap-servers", kafka_bootstrap, "--prefix", names.prefix])
        assert not ended.value.code
        return capsys.readouterr().out

    listed = await asyncio.to_thread(command, "list")
    assert "0:0 InvalidMessage delivery.prompts.bulk-0-1 bad" in listed
    assert json.loads(await asyncio.to_thread(command, "show", "0:0"))["request_id"] == "bad"
    assert "as bad" in await asyncio.to_thread(command, "replay", "0:0")
    async with asyncio.timeout(40):
        await WorkerApp(settings, broker, ScriptedEngine(), SystemClock()).run(until_end=True)
    assert await answered(broker, names) == sorted([*expected, ("bad", "error")])
    await producer.stop()
    await admin.stop()
