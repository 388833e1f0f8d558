"""Two workers on a real Kafka: one is killed in the middle of streams, and every prompt is still answered once."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.api import ChatMessage, PriorityClass
from engine.scripted import ScriptedEngine, scripted_answer
from topics.attempts import AttemptReader, AttemptState
from topics.names import TopicNames
from worker.broker.api import NewTopic
from worker.broker.kafka import KafkaBroker
from worker.broker.kafka_connection import KafkaConnection
from worker.provision import create_topics, topics_of

NUM_PROMPTS = 200
MAX_TOKENS = 60


def start_worker(bootstrap: str, prefix: str, log: Path) -> "subprocess.Popen[bytes]":
    """A worker on the scripted engine, its probes on ports of the system's choice."""
    command = [sys.executable, "-m", "worker", "worker", "--engine", "scripted", "--bootstrap-servers", bootstrap]
    command += ["--prefix", prefix, "--group-id", prefix, "--port", "0", "--metrics-port", "0", "--log-format", "json"]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=dict(os.environ))


def prompt_of(index: int) -> str:
    """Half of them stream slowly, so that a kill finds them in the middle."""
    return f"prompt {index} [[tokens={MAX_TOKENS}]]" + (" [[slow]]" if index % 2 else "")


async def send_prompts(broker: KafkaBroker, names: TopicNames) -> dict[str, str]:
    """Send every prompt, on mixed routes and modes; request id -> expected text."""
    engine = ScriptedEngine()
    expected = {}
    producer = broker.producer()
    await producer.start()
    try:
        for index in range(NUM_PROMPTS):
            request_id, text = f"r{index}", prompt_of(index)
            expected[request_id] = scripted_answer(engine.encode_chat([ChatMessage("user", text)]), MAX_TOKENS)
            body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": MAX_TOKENS}
            headers = [("x-request-id", request_id), ("x-reply-mode", ("chunks", "both", "final")[index % 3])]
            if index % 4 == 1:
                headers.append(("kafka_replyTopic", f"{names.replies}.named"))
            elif index % 40 == 2:
                headers.append(("kafka_replyTopic", names.reply_for(request_id)))
            await producer.send(
                names.prompts(list(PriorityClass)[index % 3]),
                json.dumps(body).encode(),
                key=request_id.encode(),
                headers=tuple((name, value.encode()) for name, value in headers),
            )
    finally:
        await producer.stop()
    return expected


@pytest.mark.kafka
@pytest.mark.timeout(150)
async def test_a_worker_killed_in_mid_stream_loses_no_prompt(kafka_bootstrap: str, tmp_path: Path) -> None:
    """200 prompts, three classes, mixed routes; SIGKILL with at least 8 streams open: one right answer for each."""
    names = TopicNames("kill")
    broker = KafkaBroker(KafkaConnection(kafka_bootstrap, max_message_bytes=5_000_000))
    named = f"{names.replies}.named"
    per_request = [names.reply_for(f"r{index}") for index in range(NUM_PROMPTS) if index % 40 == 2]
    await create_topics(
        broker.admin(), [*topics_of(names, max_body_bytes=4_000_000), *one_partition(named, *per_request)]
    )
    readers = {f"r{index}": AttemptReader() for index in range(NUM_PROMPTS)}
    reader = broker.reader([names.replies, named, *per_request], from_beginning=True)
    await reader.start()
    workers = [start_worker(kafka_bootstrap, "kill", tmp_path / f"worker{index}.log") for index in range(2)]
    try:
        expected = await send_prompts(broker, names)
        num_open_at_kill = None
        while not all(answer.settled for answer in readers.values()):
            for record in await reader.poll(500, 0.5):
                request_id = (dict(record.headers)["x-request-id"] or b"").decode()
                readers[request_id].feed(record.headers, record.value, record.offset)
            num_open = sum(bool(answer.attempt) and not answer.settled for answer in readers.values())
            if num_open_at_kill is None and num_open >= 16:
                num_open_at_kill = num_open
                workers[0].send_signal(signal.SIGKILL)
                await asyncio.to_thread(workers[0].wait)
            if workers[1].poll() is not None:
                pytest.fail((tmp_path / "worker1.log").read_text()[-3_000:])
        workers[1].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(workers[1].wait, 40) == 0
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
        await reader.stop()
    assert num_open_at_kill is not None, "no fault was injected"
    assert {name: answer.state for name, answer in readers.items()} == dict.fromkeys(readers, AttemptState.COMPLETE)
    assert {name: answer.text for name, answer in readers.items()} == expected


def one_partition(*topics: str) -> list[NewTopic]:
    return [NewTopic(topic) for topic in topics]
