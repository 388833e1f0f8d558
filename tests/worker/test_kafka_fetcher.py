"""Records that the Kafka library raises on, among good ones."""

from types import SimpleNamespace

import pytest
from aiokafka import TopicPartition as KafkaTopicPartition
from aiokafka import errors

from worker.broker.api import BrokerError, BrokerUnavailableError, TopicPartition, UnreadableRecordsError
from worker.broker.kafka_connection import KafkaConnection
from worker.broker.kafka_fetcher import KafkaFetcher

TP = TopicPartition("t", 0)


class Client:
    """A log of five records of which one raises. Like the library's, a call that raises has dropped what it drew."""

    def __init__(self, bad: int, error: Exception) -> None:
        self.at, self.bad, self.error = 0, bad, error

    def assignment(self):
        return {KafkaTopicPartition(*TP)}

    async def position(self, tp):
        return self.at

    def seek(self, tp, offset: int) -> None:
        self.at = offset

    async def getmany(self, tp, *, timeout_ms: int, max_records: int):
        offsets = range(self.at, min(5, self.at + max_records))
        if self.bad in offsets:
            raise self.error
        self.at = offsets.stop
        made = {"topic": "t", "partition": 0, "timestamp": 1, "key": None, "value": b"v", "headers": ()}
        return {tp: [SimpleNamespace(offset=offset, timestamp_type=1, **made) for offset in offsets]}


def fetcher_on(client: Client) -> KafkaFetcher:
    fetcher = KafkaFetcher(KafkaConnection("127.0.0.1:1"), None)
    fetcher._client = client
    return fetcher


BAD = [errors.CorruptRecordException(), errors.UnsupportedCodecError(), ValueError("of a decompressor")]


@pytest.mark.parametrize("error", BAD, ids=lambda error: type(error).__name__)
async def test_what_stands_in_front_of_a_corrupt_record_comes_and_nothing_passes_it(error):
    """Two good ones, then the error, again and again; mended, the rest comes."""
    client = Client(2, error)
    fetcher = fetcher_on(client)
    assert [record.offset for _ in range(2) for record in await fetcher.fetch(TP, 8, 0.0)] == [0, 1]
    for _ in range(2):
        with pytest.raises(UnreadableRecordsError, match="at offset 2"):
            await fetcher.fetch(TP, 8, 0.0)
    client.bad = -1
    assert [record.offset for record in await fetcher.fetch(TP, 8, 0.0)] == [2, 3, 4]


async def test_a_record_whose_headers_are_no_text_is_passed_without_its_content():
    """It is refused like any bad prompt, and those around it come whole."""
    fetcher = fetcher_on(Client(2, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")))
    records = [record for _ in range(4) for record in await fetcher.fetch(TP, 8, 0.0)]
    assert [(record.offset, record.value) for record in records] == [
        (0, b"v"),
        (1, b"v"),
        (2, None),
        (3, b"v"),
        (4, b"v"),
    ]


async def test_a_broker_that_is_away_is_no_bad_record():
    """The partition is not blamed for it."""
    with pytest.raises(BrokerUnavailableError):
        await fetcher_on(Client(0, errors.KafkaConnectionError())).fetch(TP, 8, 0.0)


@pytest.mark.parametrize("comes_up", [False, True])
async def test_a_consumer_that_is_stopped_while_it_starts_leaves_nothing_in_the_group(monkeypatch, comes_up):
    """Neither the client that was starting nor another one that the retries would make."""
    made = []

    class Starting:
        def __init__(self, **_) -> None:
            made.append(self)
            self.running = False

        def subscribe(self, topics, listener) -> None: ...

        async def start(self) -> None:
            await fetcher.stop()
            if not comes_up:
                raise errors.KafkaConnectionError
            self.running = True

        async def stop(self) -> None:
            self.running = False

    monkeypatch.setattr("worker.broker.kafka_fetcher.PatientConsumer", Starting)
    fetcher = KafkaFetcher(KafkaConnection("127.0.0.1:1"), "group")
    with pytest.raises(BrokerError):
        await fetcher.start(("t",))
    assert [client.running for client in made] == [False]
    assert not fetcher.running
