"""What every broker promises, asked of the one in memory and of a real Kafka."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from worker.broker.api import (
    Broker,
    CommitRejectedError,
    MessageTooLargeError,
    NewTopic,
    OffsetCommit,
    Record,
    TopicNotAvailableError,
    TopicPartition,
)
from worker.broker.kafka import KafkaBroker, KafkaConnection
from worker.broker.memory import MemoryBroker

PATIENCE = 20.0


class Recorder:
    """A listener that remembers, and can be waited for."""

    def __init__(self) -> None:
        self.revoked: list[frozenset[TopicPartition]] = []
        self.assigned: asyncio.Queue[frozenset[TopicPartition]] = asyncio.Queue()

    async def on_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self.revoked.append(frozenset(revoked))

    async def on_assigned(self, assigned: Collection[TopicPartition]) -> None:
        await self.assigned.put(frozenset(assigned))

    async def until_assigned(self, num_partitions: int) -> frozenset[TopicPartition]:
        async with asyncio.timeout(PATIENCE):
            while len(tps := await self.assigned.get()) != num_partitions:
                pass
        return tps


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.kafka)])
def broker(request: pytest.FixtureRequest) -> Broker:
    if request.param == "memory":
        return MemoryBroker()
    return KafkaBroker(KafkaConnection(bootstrap_servers=request.getfixturevalue("kafka_bootstrap")))


@asynccontextmanager
async def started(*clients: Any) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for client in clients:
            await client.start()
            stack.push_async_callback(client.stop)
        yield


@pytest.fixture
async def topic(broker: Broker) -> str:
    """A topic of three partitions that the broker stamps."""
    name = f"t-{uuid.uuid4().hex[:12]}"
    admin = broker.admin()
    async with started(admin):
        assert await admin.create_topics([NewTopic(name, 3, {"message.timestamp.type": "LogAppendTime"})]) == [name]
    return name


async def drain(client: Any, tp: TopicPartition, num_records: int) -> list[Record]:
    records: list[Record] = []
    async with asyncio.timeout(PATIENCE):
        while len(records) < num_records:
            records += await client.poll(tp, num_records, 1.0)
    return records


async def test_the_first_record_of_any_partition_ends_the_wait(broker: Broker, topic: str) -> None:
    """Also of one that was asked for last; each record comes once, and none is skipped."""
    tps = [TopicPartition(topic, number) for number in range(3)]
    producer, listener = broker.producer(), Recorder()
    consumer = broker.consumer(f"g-{topic}", [topic], listener)
    async with started(consumer, producer):
        await listener.until_assigned(3)
        assert list(await consumer.poll_any(tps, 0.05)) == []
        for value in (b"1", b"2"):
            await producer.send(topic, value, partition=2)
        async with asyncio.timeout(PATIENCE):
            while not (first := await consumer.poll_any(tps, 10.0)):
                pass
        assert [(record.tp, record.value) for record in first] == [(tps[2], b"1")]
        assert [record.value for record in await drain(consumer, tps[2], 1)] == [b"2"]


async def test_a_record_comes_back_as_it_was_sent(broker: Broker, topic: str) -> None:
    """Key, value, headers (also null and repeated ones) and offsets survive; the broker's stamp is marked as such."""
    producer, listener = broker.producer(), Recorder()
    consumer = broker.consumer(f"g-{topic}", [topic], listener)
    headers = (("a", b"1"), ("a", None), ("b", b"\x00\xff"))
    async with started(producer, consumer):
        await listener.until_assigned(3)
        tp = await producer.send(topic, b"value", key=b"key", headers=headers, partition=1)
        assert tp == TopicPartition(topic, 1)
        await producer.send(topic, None, key=b"gone", partition=1)
        first, second = await drain(consumer, tp, 2)
    assert (first.key, first.value, first.headers, first.offset) == (b"key", b"value", headers, 0)
    assert first.append_time and first.timestamp_ms > 0
    assert (second.key, second.value, second.offset) == (b"gone", None, 1)


async def test_a_key_has_the_same_partition_everywhere(broker: Broker, topic: str) -> None:
    """Both brokers place keys by murmur2: the partitions below are those of Kafka's own clients."""
    producer = broker.producer()
    async with started(producer):
        placed = [(await producer.send(topic, b"", key=key)).partition for key in (b"a", b"key", b"tenant-7", b"12345")]
    memory = MemoryBroker()
    await memory.create_topics(NewTopic(topic, 3))
    twin = memory.producer()
    async with started(twin):
        expected = [(await twin.send(topic, b"", key=key)).partition for key in (b"a", b"key", b"tenant-7", b"12345")]
    assert placed == expected


async def test_sending_to_what_does_not_exist_fails_at_once(broker: Broker, topic: str) -> None:
    """An absent topic, an invalid name and a partition out of range are refused without a stall, creating nothing."""
    producer, admin = broker.producer(), broker.admin()
    async with started(producer, admin):
        async with asyncio.timeout(5):
            for name, partition in ((f"{topic}-absent", None), ("no/topic", None), (topic, 3), (topic, -1)):
                with pytest.raises(TopicNotAvailableError):
                    await producer.send(name, b"x", partition=partition)
        assert await admin.partition_counts([topic, f"{topic}-absent"]) == {topic: 3}


async def test_a_record_too_large_is_refused_and_the_producer_lives(broker: Broker, topic: str) -> None:
    """The topic's own limit counts, and the next send succeeds."""
    producer, admin, small = broker.producer(), broker.admin(), f"{topic}-small"
    async with started(producer, admin):
        await admin.create_topics([NewTopic(small, 1, {"max.message.bytes": "2000"})])
        with pytest.raises(MessageTooLargeError):
            await producer.send(small, b"x" * 3000)
        assert await producer.send(small, b"x") == TopicPartition(small, 0)


async def test_topics_are_created_once_and_can_be_deleted(broker: Broker, topic: str) -> None:
    """Creating again is no error and reports nothing new; a deleted topic is gone from the list."""
    admin = broker.admin()
    async with started(admin):
        assert await admin.create_topics([NewTopic(topic, 3), NewTopic(f"{topic}-2")]) == [f"{topic}-2"]
        await admin.delete_topics([f"{topic}-2"])
        async with asyncio.timeout(10):
            while f"{topic}-2" in await admin.partition_counts():
                pass  # Kafka's own metadata follows a moment later


async def test_the_next_member_starts_at_the_committed_offset(broker: Broker, topic: str) -> None:
    """Offset and metadata are kept for the group; uncommitted records are delivered again."""
    producer, tp, group = broker.producer(), TopicPartition(topic, 0), f"g-{topic}"
    async with started(producer):
        for i in range(4):
            await producer.send(topic, b"%d" % i, partition=0)
    first, listener = broker.consumer(group, [topic], Recorder()), Recorder()
    async with started(first):
        assert len(await drain(first, tp, 4)) == 4
        assert await first.committed([tp]) == {tp: None}
        await first.commit({tp: OffsetCommit(2, "watermark")})
        assert await first.committed([tp]) == {tp: OffsetCommit(2, "watermark")}
    await first.stop()
    admin = broker.admin()
    async with started(admin):
        elsewhere = TopicPartition(topic, 1)
        assert await admin.committed(group, [tp, elsewhere]) == {tp: OffsetCommit(2, "watermark"), elsewhere: None}
    second = broker.consumer(group, [topic], listener)
    async with started(second):
        await listener.until_assigned(3)
        assert [record.offset for record in await drain(second, tp, 2)] == [2, 3]


async def test_a_deleted_topic_takes_its_committed_offsets_along(broker: Broker, topic: str) -> None:
    """A topic of the same name that is made afterwards begins without them: what was done is not read into it."""
    producer, admin, listener = broker.producer(), broker.admin(), Recorder()
    consumer, tp = broker.consumer("offsets-of-" + topic, [topic], listener), TopicPartition(topic, 0)
    async with started(producer, admin):
        await producer.send(topic, b"x", partition=0)
        async with started(consumer):
            await listener.until_assigned(3)
            await consumer.commit({tp: OffsetCommit(1, "what is done")})
        await admin.delete_topics([topic])
        async with asyncio.timeout(PATIENCE):
            while topic in await admin.partition_counts():
                pass
            while not await admin.create_topics([NewTopic(topic, 3)]):
                pass
            while (await admin.committed("offsets-of-" + topic, [tp]))[tp] is not None:
                pass  # the coordinator hears of it a moment later


async def test_a_rebalance_revokes_first_and_shares_ranges(broker: Broker, topic: str) -> None:
    """The old member is told what it loses; afterwards each partition has one owner and the other cannot commit it."""
    one, two, group = Recorder(), Recorder(), f"g-{topic}"
    first, second = broker.consumer(group, [topic], one), broker.consumer(group, [topic], two)
    async with started(first):
        everything = await one.until_assigned(3)
        async with started(second):
            async with asyncio.timeout(PATIENCE):
                while len(mine := await one.assigned.get()) == 3:
                    pass
            theirs = await two.until_assigned(3 - len(mine))
            assert one.revoked[0] == everything == mine | theirs
            assert not mine & theirs
            with pytest.raises(CommitRejectedError):
                await first.commit({next(iter(theirs)): OffsetCommit(0)})
            assert list(await first.poll(next(iter(theirs)), 1, 5.0)) == []
        assert await one.until_assigned(3) == everything


async def test_pause_and_seek(broker: Broker, topic: str) -> None:
    """A paused partition gives nothing until it is resumed; a seek delivers again from there."""
    producer, consumer, listener, tp = broker.producer(), None, Recorder(), TopicPartition(topic, 0)
    consumer = broker.consumer(f"g-{topic}", [topic], listener)
    async with started(producer, consumer):
        await listener.until_assigned(3)
        consumer.pause([tp])
        for i in range(3):
            await producer.send(topic, b"%d" % i, partition=0)
        assert list(await consumer.poll(tp, 5, 0.2)) == []
        consumer.resume([tp])
        assert [r.offset for r in await drain(consumer, tp, 3)] == [0, 1, 2]
        consumer.seek(tp, 1)
        assert [r.offset for r in await drain(consumer, tp, 2)] == [1, 2]


async def test_offsets_by_end_and_by_time(broker: Broker, topic: str) -> None:
    """The end is one past the last record; a time finds the first record not older, or None."""
    producer, listener, tp = broker.producer(), Recorder(), TopicPartition(topic, 0)
    consumer = broker.consumer(f"g-{topic}", [topic], listener)
    async with started(producer, consumer):
        await listener.until_assigned(3)
        await producer.send(topic, b"x", partition=0)
        [record] = await drain(consumer, tp, 1)
        assert await consumer.end_offsets([tp]) == {tp: 1}
        assert await consumer.offsets_for_time([tp], record.timestamp_ms) == {tp: 0}
        assert await consumer.offsets_for_time([tp], record.timestamp_ms + 1) == {tp: None}


async def test_stop_may_be_called_twice_and_before_start(broker: Broker, topic: str) -> None:
    """Stopping is idempotent and calls no listener."""
    listener = Recorder()
    consumer = broker.consumer(f"g-{topic}", [topic], listener)
    await consumer.stop()
    await consumer.start()
    await consumer.stop()
    await consumer.stop()
    assert listener.revoked == []


@pytest.mark.parametrize("from_beginning", [True, False])
async def test_a_reader_reads_all_partitions_without_a_group(broker: Broker, topic: str, from_beginning: bool) -> None:
    """From the beginning or from the end at its start, and it knows when it has caught up."""
    producer, reader = broker.producer(), broker.reader([topic], from_beginning=from_beginning)
    async with started(producer):
        for partition in range(3):
            await producer.send(topic, b"old", partition=partition)
        async with started(reader):
            assert await reader.at_end() is not from_beginning
            await producer.send(topic, b"new", partition=2)
            expected = [b"new"] + [b"old"] * (3 if from_beginning else 0)
            values: list[bytes | None] = []
            async with asyncio.timeout(PATIENCE):
                while not await reader.at_end():
                    values += [record.value for record in await reader.poll(1, 1.0)]
    assert sorted(values, key=str) == expected


def _with_foreign_header(batch: bytes, name: bytes) -> bytes:
    """The batch with a header name of two bytes as a client in another language may send it, checksum mended."""
    from aiokafka.record.util import calc_crc32c

    changed = batch.replace(name, b"\xff\xfe")
    return changed[:17] + calc_crc32c(changed[21:]).to_bytes(4, "big") + changed[21:]


@pytest.mark.kafka
async def test_a_record_with_an_unreadable_header_comes_without_its_content(kafka_bootstrap: str) -> None:
    """So do those behind it in its producer's batch, which cannot be read past it; all others come whole."""
    from aiokafka import AIOKafkaProducer

    broker = KafkaBroker(KafkaConnection(bootstrap_servers=kafka_bootstrap))
    topic = f"unreadable-{uuid.uuid4().hex}"
    admin, listener = broker.admin(), Recorder()
    consumer = broker.consumer(f"group-{topic}", [topic], listener)
    producer = AIOKafkaProducer(bootstrap_servers=kafka_bootstrap)
    async with started(admin):
        await admin.create_topics([NewTopic(topic, 1)])
        async with started(producer, consumer):
            batch = producer.create_batch()
            for number, name in enumerate(("h0", "h1", "zz", "h3")):
                batch.append(key=None, value=str(number).encode(), timestamp=None, headers=[(name, b"x")])
            batch.close()
            batch._buffer = _with_foreign_header(bytes(batch._build()), b"zz")
            await (await producer.send_batch(batch, topic, partition=0))
            await producer.send_and_wait(topic, b"4")
            (tp,) = await listener.until_assigned(1)
            seen: list[tuple[int, bytes | None]] = []
            async with asyncio.timeout(PATIENCE):
                while len(seen) < 5:
                    seen += [(record.offset, record.value) for record in await consumer.poll(tp, 10, 0.5)]
    assert seen == [(0, b"0"), (1, b"1"), (2, None), (3, None), (4, b"4")]
