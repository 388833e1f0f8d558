"""A pause between empty fetches, for brokers that answer them at once.

Kafka holds a fetch that finds nothing until `fetch_max_wait_ms` has passed or a record comes. Brokers that only speak
its protocol may not (noida-db 0.2.3 answers within 0.2 ms whatever the request says), and aiokafka then asks again at
once, some thousand times a second, with the whole event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka import AIOKafkaConsumer

EARLY_SECONDS = 0.05
PAUSE_SECONDS = 0.02


class PatientClient:
    """An aiokafka client whose empty fetches take at least `PAUSE_SECONDS` more when they came back early.

    A fetch that brings bytes, and one that the broker held as Kafka does, passes untouched; so does everything else.
    """

    def __init__(
        self,
        client: Any,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._sleep = sleep
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def send(self, node_id: Any, request: Any, **options: Any) -> Any:
        began = self._clock()
        response = await self._client.send(node_id, request, **options)
        if _empty_fetch(response) and self._clock() - began < EARLY_SECONDS:
            await self._sleep(PAUSE_SECONDS)
        return response


class PatientConsumer(AIOKafkaConsumer):  # type: ignore[misc]
    """aiokafka's consumer over a `PatientClient`; aiokafka offers no other place to slow its fetcher down."""

    _client: Any

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._client = PatientClient(self._client)


def _empty_fetch(response: Any) -> bool:
    """True for the answer to a fetch in which no partition has bytes (the last field of each is its records)."""
    if not type(response).__name__.startswith("FetchResponse"):
        return False
    return not any(partition[-1] for _, partitions in response.topics for partition in partitions)


__all__ = ["EARLY_SECONDS", "PAUSE_SECONDS", "PatientClient", "PatientConsumer"]
