"""A broker that does not hold empty fetches must not get one after another."""

from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.protocol.fetch import FetchResponse_v11
from aiokafka.protocol.metadata import MetadataResponse_v1

from worker.broker.kafka_patience import EARLY_SECONDS, PAUSE_SECONDS, PatientClient, PatientConsumer


def _fetched(*values: bytes) -> FetchResponse_v11:
    partitions = [(number, 0, 0, 0, 0, [], -1, value) for number, value in enumerate(values)]
    return FetchResponse_v11(0, 0, 0, [("replies", partitions)])


class _Wire:
    """A client whose every answer takes `seconds`, and the clock that sees it."""

    def __init__(self, response: Any, seconds: float) -> None:
        self.now, self.slept = 0.0, 0.0
        self._response, self._seconds = response, seconds
        self.cluster = SimpleNamespace(name="the cluster")

    async def send(self, node_id: int, request: Any, *, group: str = "") -> Any:
        self.now += self._seconds
        return self._response

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def patient(self) -> PatientClient:
        return PatientClient(self, sleep=self.sleep, clock=lambda: self.now)


@pytest.mark.parametrize("values", [(), (b"",), (b"", b"")])
async def test_an_empty_fetch_that_came_back_early_is_followed_by_a_pause(values: tuple[bytes, ...]) -> None:
    """A broker that ignores the maximum wait costs a bounded number of fetches a second."""
    wire = _Wire(_fetched(*values), 0.0001)
    await wire.patient().send(1, "fetch")
    assert wire.slept == PAUSE_SECONDS


@pytest.mark.parametrize(
    ("response", "seconds"),
    [
        (_fetched(b"", b"records"), 0.0001),
        (_fetched(b""), EARLY_SECONDS),
        (_fetched(b""), 0.5),
        (MetadataResponse_v1([], -1, []), 0.0001),
    ],
)
async def test_nothing_else_waits(response: Any, seconds: float) -> None:
    """Records pass at once, and a fetch that the broker held as Kafka does is not held again."""
    wire = _Wire(response, seconds)
    assert await wire.patient().send(1, "fetch", group="any") is response
    assert wire.slept == 0


async def test_the_fetcher_of_a_consumer_sends_through_it() -> None:
    """aiokafka builds its fetcher from the client that was put in place; all other calls reach the real one."""
    consumer = PatientConsumer(bootstrap_servers="127.0.0.1:1", group_id=None)
    try:
        assert isinstance(consumer._client, PatientClient)
        assert consumer._client.cluster is consumer._client._client.cluster
    finally:
        await consumer.stop()
