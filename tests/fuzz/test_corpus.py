"""Every record of the corpus, and those that fuzzing has kept on this machine, through the wire and a whole worker."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from engine.scripted import ScriptedEngine
from topics.names import TopicNames
from worker.app import WorkerApp
from worker.broker.api import NewTopic, TopicPartition
from worker.broker.memory import MemoryBroker
from worker.clock import SystemClock
from worker.settings import Settings

sys.path.append(str(Path(__file__).parent))  # a folder of scripts, no package

from target import check, record_of

CORPUS = Path(__file__).parent / "corpus"
NAMES = TopicNames()


def inputs() -> list[bytes]:
    """With FUZZ_KEPT also what `make fuzz` kept there."""
    folders = [CORPUS, *(Path(kept) for kept in [os.environ.get("FUZZ_KEPT")] if kept)]
    return [path.read_bytes() for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_a_record_of_the_corpus_breaks_no_rule_of_the_wire(path: Path) -> None:
    """A request or an InvalidMessage, a reply that can be sent, a dead letter that can be read."""
    check(path.read_bytes())


@pytest.mark.timeout(300)
async def test_the_next_good_prompt_is_answered_after_all_of_the_corpus() -> None:
    """Zero wedges: every record is committed, every good prompt between them has its answer."""
    broker, records = MemoryBroker(), inputs()
    await broker.create_topics(*(NewTopic(name, 1) for name in (*NAMES.all_prompts, NAMES.replies)))
    await broker.create_topics(NewTopic(NAMES.control), NewTopic(NAMES.dead_letter))
    producer = broker.producer()
    await producer.start()
    good = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}).encode()
    names = []
    for i, data in enumerate(records):
        headers, value = record_of(data)
        await producer.send(NAMES.prompts("standard"), value, headers=headers)
        if i % 10 == 9 or i == len(records) - 1:
            names.append(f"good-{i}")
            await producer.send(NAMES.prompts("standard"), good, headers=(("x-request-id", names[-1].encode()),))
    settings = Settings(group_id="workers", max_body_bytes=64 << 10, max_output_tokens=8, first_token_timeout_ms=2000)
    app = WorkerApp(settings, broker, ScriptedEngine(tokens_per_second=5000), SystemClock())
    async with asyncio.timeout(280):
        await app.run(until_end=True)
    answered = {
        dict(record.headers).get("x-request-id")
        for record in broker.records(NAMES.replies)
        if dict(record.headers).get("x-event") == b"final"
    }
    assert {name.encode() for name in names} <= answered
    admin, place = broker.admin(), TopicPartition(NAMES.prompts("standard"), 0)
    commit = (await admin.committed("workers", [place]))[place]
    assert commit is not None
    assert commit.offset == len(records) + len(names)
