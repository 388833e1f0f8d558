"""What only the broker in memory can do: fail and stall on demand, and show what it holds."""

import asyncio
from collections.abc import Collection

import pytest

from worker.broker.api import (
    BrokerUnavailableError,
    NewTopic,
    OffsetCommit,
    ProducerWedgedError,
    TopicPartition,
)
from worker.broker.memory import MemoryBroker
from worker.broker.partitioner import murmur2

TP = TopicPartition("t", 0)


class Silent:
    async def on_revoked(self, revoked: Collection[TopicPartition]) -> None: ...

    async def on_assigned(self, assigned: Collection[TopicPartition]) -> None: ...


@pytest.fixture
async def broker() -> MemoryBroker:
    broker = MemoryBroker(now_ms=lambda: 7)
    await broker.create_topics(NewTopic("t"))
    return broker


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"21", -973932308), (b"foobar", -790332482), (b"a-little-bit-long-string", -985981536), (b"abc", 479470107)],
)
def test_murmur2_is_that_of_kafka(data: bytes, expected: int) -> None:
    """The vectors of Kafka's own UtilsTest."""
    assert murmur2(data) == expected & 0xFFFFFFFF


async def test_a_failed_send_writes_nothing_and_a_lost_acknowledgement_does(broker: MemoryBroker) -> None:
    """`send` fails before the append, `ack` after it; both only as often as asked."""
    producer = broker.producer()
    await producer.start()
    broker.fail_next("send", BrokerUnavailableError(), times=2)
    for _ in range(2):
        with pytest.raises(BrokerUnavailableError):
            await producer.send("t", b"lost")
    assert broker.records("t") == []
    broker.fail_next("ack", BrokerUnavailableError())
    with pytest.raises(BrokerUnavailableError):
        await producer.send("t", b"kept")
    await producer.send("t", b"next")
    assert [(r.value, r.timestamp_ms) for r in broker.records("t")] == [(b"kept", 7), (b"next", 7)]


async def test_a_wedged_producer_stays_wedged_and_a_new_one_works(broker: MemoryBroker) -> None:
    """As with Kafka, only a replacement helps."""
    producer, other = broker.producer(), broker.producer()
    await producer.start()
    await other.start()
    broker.fail_next("send", ProducerWedgedError())
    for _ in range(2):
        with pytest.raises(ProducerWedgedError):
            await producer.send("t", b"x")
    assert await other.send("t", b"x") == TP


async def test_a_failed_poll_skips_no_record(broker: MemoryBroker) -> None:
    """The position moves only with records that were returned."""
    producer, consumer = broker.producer(), broker.consumer("g", ["t"], Silent())
    await producer.start()
    await consumer.start()
    await producer.send("t", b"x")
    broker.fail_next("poll", BrokerUnavailableError())
    with pytest.raises(BrokerUnavailableError):
        await consumer.poll(TP, 1, 0)
    assert [r.value for r in await consumer.poll(TP, 1, 0)] == [b"x"]


async def test_a_stalled_operation_goes_on_when_the_stall_ends(broker: MemoryBroker) -> None:
    """A stalled commit waits, a stalled poll times out; nothing is lost."""
    consumer = broker.consumer("g", ["t"], Silent())
    await consumer.start()
    broker.stall("commit")
    async with asyncio.TaskGroup() as tasks:
        commit = tasks.create_task(consumer.commit({TP: OffsetCommit(3, "m")}))
        assert list(await consumer.poll(TP, 1, 0.01)) == []
        assert not commit.done()
        broker.unstall()
    assert await consumer.committed([TP]) == {TP: OffsetCommit(3, "m")}


async def test_a_waiting_poll_wakes_for_a_record_past_a_gap(broker: MemoryBroker) -> None:
    """Offsets may have gaps; a poll that already waits sees the record at once."""
    producer, consumer = broker.producer(), broker.consumer("g", ["t"], Silent())
    await producer.start()
    await consumer.start()
    broker.leave_gap(TP, 5)
    async with asyncio.TaskGroup() as tasks:
        poll = tasks.create_task(consumer.poll(TP, 10, 30))
        tasks.create_task(producer.send("t", b"x"))
    assert [r.offset for r in poll.result()] == [5]


async def test_a_topic_created_later_is_assigned(broker: MemoryBroker) -> None:
    """A group that waits for a topic gets it when it appears, and loses it when it is deleted."""
    consumer = broker.consumer("g", ["later"], Silent())
    await consumer.start()
    assert consumer.assignment() == frozenset()
    await broker.create_topics(NewTopic("later", 2))
    assert len(consumer.assignment()) == 2
    await broker.admin().delete_topics(["later"])
    assert consumer.assignment() == frozenset()


async def test_a_reader_is_at_the_end_of_a_log_that_ends_in_a_gap(broker: MemoryBroker) -> None:
    """Whoever waits for the end of a topic does not wait for offsets that hold no record."""
    await broker.create_topics(NewTopic(TP.topic, 1))
    producer, reader = broker.producer(), broker.reader([TP.topic], from_beginning=True)
    await producer.start()
    await producer.send(TP.topic, b"only")
    broker.leave_gap(TP, 3)
    await reader.start()
    assert not await reader.at_end()
    assert [record.value for record in await reader.poll(10, 0)] == [b"only"]
    assert await reader.at_end()
