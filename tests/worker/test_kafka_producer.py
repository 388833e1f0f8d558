"""What the Kafka library accepts and does not acknowledge in time."""

import asyncio
from types import SimpleNamespace

import pytest

from engine.api import Delta, Usage
from topics.replies import ReplyContext
from worker.broker.api import BrokerUnavailableError, ProducerWedgedError, UnacknowledgedError
from worker.broker.kafka_connection import KafkaConnection
from worker.broker.kafka_producer import KafkaProducer
from worker.renewing_producer import RenewingProducer, ResendingProducer, _Generation
from worker.replies.api import Destination, ReplyUndeliverable
from worker.replies.final import FinalReplier
from worker.replies.restarting import RestartingReplier
from worker.replies.sink import BrokerSink


class LateClient:
    """Like the library's with idempotence: what it has accepted is written, however late the broker answers."""

    def __init__(self, *, accepts: bool = True, num_late: int = 1) -> None:
        self.accepted: list[dict[str, bytes]] = []
        self._accepts, self._num_late = accepts, num_late
        self._sender = SimpleNamespace(sender_task=None)

    async def send(self, topic, value, *, key, partition, headers):
        future = asyncio.get_running_loop().create_future()
        if not self._accepts:
            await asyncio.Event().wait()
        self.accepted.append(dict(headers))
        if len(self.accepted) > self._num_late:
            future.set_result(SimpleNamespace(topic=topic, partition=0))
        return asyncio.shield(future)

    async def send_and_wait(self, topic, value, **options):
        return await (await self.send(topic, value, **options))


class Counts:
    """An admin client of a cluster with one topic."""

    async def partition_counts(self) -> dict[str, int]:
        return {"t": 1}


def producer_on(client: LateClient) -> KafkaProducer:
    producer = KafkaProducer(KafkaConnection("127.0.0.1:1", request_timeout_seconds=0.01))
    producer._client, producer._admin = client, Counts()
    return producer


def replier_on(producer: KafkaProducer, *, give_up_seconds: float) -> RestartingReplier:
    context = ReplyContext(request_id="r", attempt="first", operation="chat", model="m", created=0)
    return RestartingReplier(
        FinalReplier(context, BrokerSink(producer, Destination("t", b"k"), give_up_seconds=give_up_seconds))
    )


async def test_a_record_that_is_acknowledged_late_is_never_sent_again_in_its_attempt():
    """It will be there: a second copy would be the same seq twice, so another attempt says it."""
    client = LateClient()
    replier = replier_on(producer_on(client), give_up_seconds=5.0)
    await replier.send(Delta(0, "text", (1,), finish_reason="stop", usage=Usage(1, 1)))
    await replier.finish()
    said = [(headers["x-attempt"], headers["x-seq"]) for headers in client.accepted]
    assert len(said) == len(set(said)) == 2


async def test_attempts_that_begin_again_do_not_add_to_the_time_for_a_reply():
    """It counts from the last acknowledged record."""
    client = LateClient(num_late=100)
    replier = replier_on(producer_on(client), give_up_seconds=0.05)
    await replier.send(Delta(0, "text", (1,), finish_reason="stop", usage=Usage(1, 1)))
    with pytest.raises(ReplyUndeliverable, match="no acknowledgement within"):
        await replier.finish()
    assert len(client.accepted) <= 3


async def test_a_record_that_was_not_accepted_in_time_may_be_sent_again():
    """The library knows no topic's leader yet, or has no room: nothing of it will ever be written."""
    with pytest.raises(BrokerUnavailableError):
        await producer_on(LateClient(accepts=False)).send("t", b"v")
    producer = producer_on(LateClient())
    with pytest.raises(UnacknowledgedError):
        await producer.send("t", b"v")
    assert producer._counts == {}, "the topic may have been deleted, and is looked for again"


async def test_a_late_acknowledgement_replaces_no_producer_and_is_an_absent_broker_to_those_who_may_send_twice():
    """The others go on with theirs, and whoever tries again knows for how long."""
    made = []

    def make():
        made.append(producer_on(LateClient()))
        return made[-1]

    renewing = RenewingProducer(make)
    renewing._current = _Generation(make())
    with pytest.raises(BrokerUnavailableError):
        await ResendingProducer(renewing).send("t", b"v")
    await ResendingProducer(renewing).send("t", b"v")
    assert len(made) == 1


async def test_a_client_that_has_ended_is_wedged_and_no_late_one():
    """Nothing it has accepted will ever be written: it has to be replaced."""
    client = LateClient()
    client._sender.sender_task = SimpleNamespace(done=lambda: True)
    producer = producer_on(client)
    for _ in range(2):
        with pytest.raises(ProducerWedgedError) as told:
            await producer.send("t", b"v")
        assert not isinstance(told.value, UnacknowledgedError)
    assert len(client.accepted) == 1
