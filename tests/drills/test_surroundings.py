"""What is wrong around the worker: its disk, its clock, its rights, its sister of another version, its backlog."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest
from secured import password_of

from engine.api import PriorityClass
from worker.broker.api import NewTopic

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]

STREAM = "tell [[tokens=60]] [[slow]]"
SHORT = "tell [[tokens=20]]"
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
TOPIC, LITERAL, PREFIXED, ALL, WRITE, DENY, ALLOW, GROUP, CLUSTER = 2, 3, 4, 2, 4, 2, 3, 3, 4
NUM_BACKLOG = int(os.environ.get("DRILLS_BACKLOG", "100000"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(file: Path) -> None:
    """To the last byte of its disk."""
    with file.open("wb", buffering=0) as rest, pytest.raises(OSError, match="No space"):
        while True:
            rest.write(bytes(4096))


async def test_the_disk_of_the_worker_is_full(kafka, ledger, workers, passed, small_disk):
    """Its log and its temporary files find no room: that costs log lines and nothing else."""
    worker = workers.start(kafka.bootstrap_servers, environ={"TMPDIR": str(small_disk)}, log_folder=small_disk)
    await workers.until_serving(worker)
    await ledger.send(12, STREAM)
    await ledger.until_streaming(12)
    fill(small_disk / "rest")
    ledger.fault()
    size = worker.log.stat().st_size
    await ledger.send(60, SHORT)
    await ledger.send(6, "[[memory]]", error="internal_error")
    await ledger.until_settled()
    await ledger.until_committed()
    assert worker.log.stat().st_size - size < 8192, "the disk was not full"
    assert worker.runs
    assert await workers.end(worker) == 0
    passed("the worker's disk full (a tmpfs of 4 MB)")


@pytest.mark.skipif(not FAKETIME.exists(), reason="needs libfaketime (Debian's package of that name)")
@pytest.mark.parametrize("hours", [1, -1])
async def test_the_clock_of_the_worker_is_an_hour_off(kafka, ledger, workers, passed, hours):
    """No request with time left is ended, and `/ready` says what is wrong."""
    faked = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": f"{hours * 3600:+d}", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    await ledger.send(12, SHORT, x_ttl_ms="120000")
    ledger.fault()
    worker = workers.start(kafka.bootstrap_servers, environ={**faked, "DONT_FAKE_MONOTONIC": "1"})
    await ledger.send(12, STREAM, x_ttl_ms="120000")
    await ledger.send(12, STREAM, x_deadline_ms=str(int(time.time() * 1000) + 120_000))
    await ledger.until_settled()
    await ledger.until_committed()
    status, said = await worker.get("/ready")
    assert (status, "the broker's, deadlines are suspended" in said) == (503, True), said
    assert await workers.end(worker) == 0
    passed(f"worker's clock an hour {'ahead' if hours > 0 else 'behind'}")


async def make_acl(admin, kind: int, name: str, pattern: int, operation: int, effect: int) -> None:
    response = await admin._send_request(CreateAclsRequest(kind, name, pattern, "User:worker", "*", operation, effect))
    assert response.to_object()["creation_responses"][0]["error_code"] == 0


async def test_a_reply_topic_without_permission(secured, workers, passed):
    """The request that named it becomes a dead letter; the others stream on."""
    server, ledger = secured
    closed, prefix = f"{ledger.names.replies}.closed", ledger.names.prefix
    admin = AIOKafkaAdminClient(bootstrap_servers=server.bootstrap_servers)
    await admin.start()
    await make_acl(admin, TOPIC, prefix, PREFIXED, ALL, ALLOW)
    await make_acl(admin, GROUP, prefix, LITERAL, ALL, ALLOW)
    await make_acl(admin, TOPIC, closed, LITERAL, WRITE, DENY)
    await admin.close()
    topics = ledger.broker.admin()
    await topics.start()
    await topics.create_topics([NewTopic(closed)])
    await topics.stop()
    worker = workers.start(
        server.sasl,
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-256",
        sasl_username="worker",
        sasl_password=password_of("worker"),
        reply_give_up_seconds=10,
    )
    await ledger.send(12, STREAM)
    await ledger.until_streaming(12)
    ledger.fault()
    num_refused = await ledger.send_unread(6, SHORT, closed)
    await ledger.send(12, SHORT)
    await ledger.until_settled()
    await ledger.until_dead_letters(num_refused, seconds=60.0)
    await ledger.until_committed()
    assert worker.runs, worker.log.read_text()[-3000:]
    assert await workers.end(worker) == 0
    passed("reply topic without permission (6 dead letters)", ledger=ledger)


OTHER_VERSION = """
import sys
import worker.commit_metadata
worker.commit_metadata._VERSION = "v4f2."
from worker.cli import main
main(sys.argv[1:])
"""


async def test_two_workers_of_different_versions(kafka, ledger, workers, passed):
    """Neither reads what the other says beside its offsets: that costs a second answer and no prompt."""
    await ledger.send(12, STREAM)
    one = workers.start(kafka.bootstrap_servers)
    await ledger.until_streaming(12)
    ledger.fault()
    two = workers.start(kafka.bootstrap_servers, program=("-c", OTHER_VERSION))
    await workers.until_serving(two)
    await ledger.send(24, STREAM)
    await ledger.until_settled()
    await ledger.until_committed()
    await ledger.send(24, STREAM)
    await ledger.until_streaming(12)
    await workers.kill(two)
    await ledger.until_settled()
    await ledger.until_committed()
    assert ledger.num_twice >= 1
    assert await workers.end(one) == 0
    passed("two workers of different metadata versions", max_duplicates=48)


async def test_a_backlog_of_a_hundred_thousand(kafka, ledger, workers, passed):
    """Memory stays flat, and every class moves, the urgent one fastest. `DRILLS_BACKLOG` is for slow machines."""
    for cls in PriorityClass:
        await ledger.send(NUM_BACKLOG // 3, "b [[tokens=4]]", mode="final", cls=cls)
    ledger.fault()
    worker = workers.start(kafka.bootstrap_servers, scripted_tokens_per_second=1e6, disable_log_requests=True)
    urgent = [entry for entry in ledger.entries.values() if entry.where.topic == ledger.names.prompts("urgent")]
    sizes, shares = [], {}
    while ledger.num_settled < len(ledger.entries):
        await ledger.read(2.0)
        sizes.append((ledger.num_settled, worker.rss_bytes))
        if not shares and sum(entry.answer.settled for entry in urgent) > 0.9 * len(urgent):
            for cls in PriorityClass:
                of = [e.answer.settled for e in ledger.entries.values() if e.where.topic == ledger.names.prompts(cls)]
                shares[cls] = sum(of) / len(of)
        assert worker.runs, worker.log.read_text()[-3000:]
    await ledger.until_committed()
    early = max(size for settled, size in sizes if settled < 0.2 * len(ledger.entries))
    growth = max(size for _, size in sizes) - early
    assert growth < 64e6, sizes
    assert shares[PriorityClass.URGENT] > shares[PriorityClass.STANDARD] > shares[PriorityClass.BULK] > 0.03, shares
    assert await workers.end(worker) == 0
    parts = "/".join(f"{share:.0%}" for share in shares.values())
    passed(f"backlog of {len(ledger.entries):,} (grew {growth / 1e6:.0f} MB; classes {parts})")
