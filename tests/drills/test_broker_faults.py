"""The broker goes away, or a connection to it breaks, while streams are open."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import TopicPartition as KafkaTopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.record.util import calc_crc32c
from proxy import Action, ApiKey, KafkaError

from worker.broker.api import TopicPartition

pytestmark = [pytest.mark.drill, pytest.mark.timeout(420)]

STREAM = "tell [[tokens=60]] [[slow]]"
SHORT = "tell [[tokens=20]]"


@asynccontextmanager
async def admin_of(kafka):
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await admin.start()
    yield admin
    await admin.close()


@pytest.mark.parametrize("how", ["clean", "SIGKILL"])
async def test_broker_restart_during_streams(kafka, ledger, workers, passed, how):
    """The worker lives through it, and its streams go on."""
    worker = workers.start(kafka.bootstrap_servers)
    await ledger.send(24, STREAM)
    await ledger.until_streaming(16)
    ledger.fault()
    await asyncio.to_thread(kafka.kill if how == "SIGKILL" else kafka.stop)
    assert ledger.num_streaming >= 16
    await asyncio.to_thread(kafka.start)
    await ledger.until_settled()
    await ledger.send(12, SHORT)
    await ledger.until_settled()
    await ledger.until_committed()
    assert worker.runs, worker.log.read_text()[-2000:]
    assert await workers.end(worker) == 0
    passed(f"broker restart, {how}, during streams")


async def test_a_broker_that_is_away_for_a_minute(kafka, ledger, workers, passed):
    """The worker keeps what it has generated, and says it when the broker is back."""
    worker = workers.start(kafka.bootstrap_servers, reply_give_up_seconds=120)
    await ledger.send(24, STREAM)
    await ledger.until_streaming(16)
    ledger.fault()
    await asyncio.to_thread(kafka.kill)
    await asyncio.sleep(60.0)
    await asyncio.to_thread(kafka.start)
    back = asyncio.get_running_loop().time()
    await ledger.until_settled()
    seconds = asyncio.get_running_loop().time() - back
    await ledger.send(12, SHORT)
    await ledger.until_settled()
    await ledger.until_committed()
    assert ledger.num_open_at_fault >= 16
    assert worker.runs, worker.log.read_text()[-2000:]
    assert await workers.end(worker) == 0
    passed(f"broker away for 60 s ({seconds:.0f} s of it after its return)", max_duplicates=24)


async def test_a_worker_stops_while_the_broker_is_away(kafka, ledger, workers, passed):
    """Within its grace, although nothing can be said or committed; the next one answers."""
    worker = workers.start(kafka.bootstrap_servers, grace_seconds=5)
    await ledger.send(12, STREAM)
    await ledger.until_streaming(12)
    ledger.fault()
    await asyncio.to_thread(kafka.kill)
    began = asyncio.get_running_loop().time()
    try:
        assert await workers.end(worker) == 0
    finally:
        seconds = asyncio.get_running_loop().time() - began
        await asyncio.to_thread(kafka.start)
    second = workers.start(kafka.bootstrap_servers)
    await ledger.until_settled()
    await ledger.until_committed()
    assert await workers.end(second) == 0
    assert seconds < 5 + 8, seconds
    passed(f"SIGTERM while the broker is away ({seconds:.1f} s, grace 5 s)", max_duplicates=12)


async def test_a_log_that_was_trimmed_past_the_committed_offset(kafka, ledger, workers, passed):
    """What the broker has deleted is gone; what is left is answered, and the commit passes the gap."""
    first = workers.start(kafka.bootstrap_servers)
    await ledger.send(12, SHORT)
    await ledger.until_settled()
    await ledger.until_committed()
    assert await workers.end(first) == 0
    trimmed = await ledger.send(24, SHORT)
    kept = await ledger.send(24, SHORT)
    before = {ledger.entries[name].where: ledger.entries[name].offset + 1 for name in trimmed}
    async with admin_of(kafka) as admin:
        await admin.delete_records({KafkaTopicPartition(*tp): RecordsToDelete(at) for tp, at in before.items()})
    committed = await ledger.committed()
    assert all(committed[tp] < at for tp, at in before.items())
    ledger.drop(trimmed)
    ledger.fault()
    second = workers.start(kafka.bootstrap_servers)
    await ledger.until_settled()
    await ledger.until_committed()
    assert await workers.end(second) == 0
    assert len(kept) == ledger.num_open_at_fault
    passed("log trimmed past the committed offset")


async def test_produce_connection_cut_after_the_request_was_sent(proxy, ledger, workers, passed):
    """The broker has the records and the worker hears nothing: the retry is no second copy for the reader."""
    worker = workers.start(f"127.0.0.1:{proxy.port}")
    await ledger.send(12, STREAM)
    await ledger.until_streaming(12)
    rule = proxy.rule(ApiKey.PRODUCE, Action.CUT, times=3)
    await asyncio.wait_for(rule.hit.wait(), 90)
    ledger.fault()
    await ledger.until_settled()
    await ledger.until_committed()
    assert worker.runs, worker.log.read_text()[-2000:]
    assert await workers.end(worker) == 0
    passed("produce connection cut after the request")


COORDINATOR_ERRORS = [
    (ApiKey.HEARTBEAT, KafkaError.COORDINATOR_NOT_AVAILABLE),
    (ApiKey.HEARTBEAT, KafkaError.ILLEGAL_GENERATION),
    (ApiKey.HEARTBEAT, KafkaError.UNKNOWN_MEMBER_ID),
    (ApiKey.JOIN_GROUP, KafkaError.COORDINATOR_LOADING),
    (ApiKey.JOIN_GROUP, KafkaError.UNKNOWN_MEMBER_ID),
    (ApiKey.SYNC_GROUP, KafkaError.REBALANCE_IN_PROGRESS),
    (ApiKey.OFFSET_COMMIT, KafkaError.NOT_COORDINATOR),
    (ApiKey.OFFSET_COMMIT, KafkaError.ILLEGAL_GENERATION),
    (ApiKey.OFFSET_COMMIT, KafkaError.REBALANCE_IN_PROGRESS),
]


async def test_errors_of_the_coordinator(proxy, ledger, workers, passed):
    """One after the other on join, sync, heartbeat and commit, with streams open: none is lost, and none ends the
    worker."""
    worker = workers.start(f"127.0.0.1:{proxy.port}")
    await workers.until_serving(worker)
    for key, error in COORDINATOR_ERRORS:
        await ledger.send(12, STREAM)
        await ledger.until_streaming(6)
        rule = proxy.rule(key, Action.FAIL, error=error)
        if key in (ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP):  # asked only in a rebalance
            proxy.rule(ApiKey.HEARTBEAT, Action.FAIL, error=KafkaError.REBALANCE_IN_PROGRESS)
        ledger.fault()
        await ledger.until(rule.hit.is_set, seconds=90, what=f"{error.name} on {key.name}")
        await ledger.until_settled()
        proxy.clear()
    await ledger.until_committed(seconds=60.0)
    assert worker.runs, worker.log.read_text()[-3000:]
    assert await workers.end(worker) == 0
    passed("9 errors of the coordinator on join, sync, heartbeat, commit", max_duplicates=12 * len(COORDINATOR_ERRORS))


async def test_a_wedged_producer(proxy, ledger, workers, passed):
    """Told that its sequence is broken, it can never send again: another one says what was kept, in a new attempt."""
    worker = workers.start(f"127.0.0.1:{proxy.port}")
    await ledger.send(12, STREAM)
    await ledger.until_streaming(12)
    rule = proxy.rule(ApiKey.PRODUCE, Action.FAIL, error=KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER)
    ledger.fault()
    await ledger.until(rule.hit.is_set, seconds=90, what="a broken sequence")
    await ledger.until_settled()
    await ledger.until_committed()
    assert ledger.num_twice >= 1
    assert worker.runs, worker.log.read_text()[-3000:]
    assert await workers.end(worker) == 0
    passed("a wedged idempotent producer", max_duplicates=12)


def damage(kafka, where, at_offset: int, how: str) -> "tuple[Path, bytes]":
    """Change the batch at an offset in the broker's file; the file and what it was."""
    file = kafka.folder / "logs" / f"{where.topic}-{where.partition}" / "00000000000000000000.log"
    whole = file.read_bytes()
    begin = 0
    while int.from_bytes(whole[begin : begin + 8], "big") < at_offset:
        begin += 12 + int.from_bytes(whole[begin + 8 : begin + 12], "big")
    end = begin + 12 + int.from_bytes(whole[begin + 8 : begin + 12], "big")
    changed = bytearray(whole)
    if how == "corrupt":
        changed[end - 1] ^= 0xFF
    else:  # no codec has number 7; the checksum, over all from the attributes on, is right
        changed[begin + 22] |= 7
        changed[begin + 17 : begin + 21] = calc_crc32c(bytes(changed[begin + 21 : end])).to_bytes(4, "big")
    write_in_place(file, bytes(changed))
    return file, whole


def write_in_place(file: Path, content: bytes) -> None:
    with file.open("r+b") as out:
        out.write(content)


@pytest.mark.parametrize("how", ["corrupt", "unknown codec"])
async def test_a_batch_that_cannot_be_read_in_one_of_two_partitions(kafka, ledger, workers, passed, how):
    """The other partition is served, the worker lives and says where it stands; mended, the rest is answered."""
    ledger.num_partitions = 2
    await ledger.send(16, SHORT, at_once=1)
    bad = TopicPartition(ledger.names.prompts("standard"), 0)
    file, whole = damage(kafka, bad, 3, how)
    ledger.fault()
    worker = workers.start(kafka.bootstrap_servers)
    readable = [entry for entry in ledger.entries.values() if entry.where != bad or entry.offset < 3]
    await ledger.until(lambda: all(entry.answer.settled for entry in readable), seconds=180, what="what can be read")
    await ledger.send(16, SHORT, cls="urgent")
    await ledger.until(lambda: ledger.num_settled >= 27, seconds=180, what="urgent")
    await ledger.read(12.0)  # two more tries of the partition
    assert worker.runs, worker.log.read_text()[-3000:]
    status, said = await worker.get("/ready")
    assert (status, f"{bad.topic}[{bad.partition}]" in said) == (503, True), said
    assert ledger.num_settled == 27
    write_in_place(file, whole)
    await ledger.until_settled()
    await ledger.until_committed()
    assert (await worker.get("/ready"))[0] == 200
    assert await workers.end(worker) == 0
    passed(f"{how} batch in one of two partitions, then mended")
