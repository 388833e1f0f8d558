"""What an operator sees of a real worker on a real Kafka: doctor, inspect, partitions, the flight recorder."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from topics.names import TopicNames
from worker.cli.doctor import facts_of
from worker.cli.inspect import find
from worker.client import Client, Prompt
from worker.doctor import Role, Severity, findings
from worker.provision import create_topics, topics_of
from worker.serve import build_broker
from worker.settings import Settings
from worker.whereabouts import Stage

NAMES = TopicNames("operations")
WAIT_SECONDS = 60


@asynccontextmanager
async def worker(settings: Settings, folder: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A whole worker, supervisor and child; its log is `worker.log`."""
    command = [sys.executable, "-m", "worker", "worker", "--engine", "scripted", "--port", "0", "--metrics-port", "0"]
    command += ["--bootstrap-servers", settings.bootstrap_servers, "--prefix", settings.prefix, "--log-format", "json"]
    command += ["--group-id", settings.group_id, "--flight-recorder-dir", str(folder)]
    with (folder / "worker.log").open("wb") as out:
        process = await asyncio.to_thread(subprocess.Popen, command, stdout=out, stderr=out, env=dict(os.environ))
    try:
        yield process
    finally:
        process.terminate()
        assert await asyncio.to_thread(process.wait, WAIT_SECONDS) == 0


def text_of(path: Path) -> str:
    return path.read_text()


def logged(folder: Path, event: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / "worker.log").read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


async def metrics(port: object) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(str(port)))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: worker\r\n\r\n")
    told = await reader.read()
    writer.close()
    return told.decode()


@pytest.mark.kafka
@pytest.mark.timeout(200)
async def test_an_operator_can_see_what_becomes_of_a_prompt(kafka_bootstrap: str, tmp_path: Path) -> None:
    """A healthy cluster, a prompt followed to its commit, the partition it was in, and the last steps on SIGQUIT."""
    settings = Settings(
        bootstrap_servers=kafka_bootstrap, prefix=NAMES.prefix, group_id=NAMES.prefix, max_body_bytes=1_000_000
    )
    broker = build_broker(settings)
    await create_topics(broker.admin(), topics_of(NAMES, max_body_bytes=1_000_000, num_partitions=2))
    found = findings(settings, await facts_of(settings, Role.WORKER), Role.WORKER)
    assert {finding.severity for finding in found} == {Severity.OK}, found
    prompt = Prompt("kumquat", max_tokens=5)
    async with worker(settings, tmp_path) as process, Client(broker, NAMES) as client:
        assert (await client.ask(prompt, timeout_seconds=WAIT_SECONDS)).usage["completion_tokens"] == 5
        async with asyncio.timeout(WAIT_SECONDS):
            while (await find(broker, settings, prompt.request_id))[0].stage is not Stage.COMMITTED:
                pass
        (starting,) = logged(tmp_path, "worker starting")
        told = await metrics(starting["metrics_port"])
        assert told.count("v4flash_partition_backlog_tokens{") == 6
        os.kill(process.pid, signal.SIGQUIT)
        async with asyncio.timeout(WAIT_SECONDS):
            while not logged(tmp_path, "flight recorder written"):
                await find(broker, settings, prompt.request_id)
        (written,) = logged(tmp_path, "flight recorder written")
        path = Path(str(written["path"]))
        assert path.parent == tmp_path
        events = text_of(path)
        kinds = {json.loads(line)["kind"] for line in events.splitlines()}
        assert {"flight", "thread", "assigned", "start", "end"} <= kinds
    assert "kumquat" not in events + text_of(tmp_path / "worker.log")
