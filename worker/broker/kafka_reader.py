"""Reads whole Kafka topics without a group."""

import time
from collections.abc import Sequence
from typing import Any

from worker.broker.api import Record, TopicNotAvailableError, TopicPartition
from worker.broker.kafka_admin import KafkaAdmin
from worker.broker.kafka_connection import KafkaConnection
from worker.broker.kafka_fetcher import KafkaFetcher

_SLICE_SECONDS = 0.02  # a record waits so long at most while another partition is waited for


class KafkaReader:
    """See `worker.broker.api.Reader`. Asks partition by partition, so that no failure drops another's records."""

    def __init__(self, connection: KafkaConnection, topics: Sequence[str], *, from_beginning: bool) -> None:
        self._connection = connection
        self._topics = tuple(topics)
        self._from_beginning = from_beginning
        self._fetcher = KafkaFetcher(connection, None)
        self._tps: list[TopicPartition] = []

    async def start(self) -> None:
        admin = KafkaAdmin(self._connection)
        await admin.start()
        try:
            counts = await admin.partition_counts(self._topics)
        finally:
            await admin.stop()
        if absent := set(self._topics) - counts.keys():
            raise TopicNotAvailableError(f"there is no topic {', '.join(sorted(absent))}")
        await self._fetcher.start()
        self._tps = [TopicPartition(name, partition) for name, num in counts.items() for partition in range(num)]
        client: Any = self._fetcher.client
        client.assign(self._fetcher.foreign(self._tps))
        starts = (
            await self._fetcher.ends(self._tps) if not self._from_beginning else await self._fetcher.starts(self._tps)
        )
        for tp, offset in starts.items():
            self._fetcher.seek(tp, offset)

    async def stop(self) -> None:
        self._tps = []
        await self._fetcher.stop()

    async def poll(self, max_records: int, timeout_seconds: float) -> Sequence[Record]:
        deadline = time.monotonic() + timeout_seconds
        wait = 0.0
        while self._tps:
            for i, tp in enumerate(self._tps):
                if records := await self._fetcher.fetch(tp, max_records, wait if i == 0 else 0.0):
                    self._tps = self._tps[i + 1 :] + self._tps[: i + 1]
                    return records
            left = deadline - time.monotonic()
            if left <= 0:
                break
            wait = left if len(self._tps) == 1 else min(left, _SLICE_SECONDS)
        return []

    async def at_end(self) -> bool:
        ends = await self._fetcher.ends(self._tps)
        return all([await self._fetcher.position(tp) >= end for tp, end in ends.items()])
