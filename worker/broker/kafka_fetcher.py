"""An aiokafka consumer that loses no record: one partition a call, our own next offset, moved back on every failure."""

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from aiokafka import TopicPartition as KafkaTopicPartition
from aiokafka import errors
from aiokafka.coordinator.assignors.range import RangePartitionAssignor

from worker.broker.api import BrokerError, BrokerUnavailableError, Record, TopicPartition, UnreadableRecordsError
from worker.broker.kafka_connection import (
    KafkaConnection,
    mapped_errors,
    retrying,
    start_or_stop,
    starting,
    stop_bounded,
)
from worker.broker.kafka_patience import PatientConsumer

UNREADABLE = (errors.CorruptRecordException, errors.UnsupportedCodecError)
AGAIN_SECONDS = 1.0  # what was fetched is gone, and has to come again


class KafkaFetcher:
    """Starts, reads and stops; knows nothing of groups but the name it passes on."""

    def __init__(self, connection: KafkaConnection, group: str | None) -> None:
        self._connection = connection
        self._group = group
        self._client: Any = None
        self._next: dict[TopicPartition, int] = {}
        self._closed = False

    @property
    def client(self) -> Any:
        """The running aiokafka consumer; raises BrokerUnavailableError when there is none."""
        if self._client is None:
            raise BrokerUnavailableError("the consumer is not running")
        return self._client

    @property
    def running(self) -> bool:
        return self._client is not None

    @staticmethod
    def foreign(tps: Collection[TopicPartition]) -> list[Any]:
        return [KafkaTopicPartition(*tp) for tp in tps]

    async def start(self, topics: Sequence[str] = (), listener: Any = None) -> None:
        """Connect, and subscribe to `topics` if any are given; retried while the broker is away. Raises BrokerError
        where it is stopped meanwhile: nothing stays behind that would be a member of the group."""
        connection = self._connection
        self._closed = False

        async def attempt() -> None:
            self._check_open()
            client = PatientConsumer(
                **connection.client_arguments(),
                group_id=self._group,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                isolation_level="read_committed",
                partition_assignment_strategy=(RangePartitionAssignor,),
                max_partition_fetch_bytes=connection.max_message_bytes,
                session_timeout_ms=int(connection.session_timeout_seconds * 1000),
                heartbeat_interval_ms=int(connection.heartbeat_interval_seconds * 1000),
                rebalance_timeout_ms=int(connection.rebalance_timeout_seconds * 1000),
                max_poll_interval_ms=int(connection.max_poll_interval_seconds * 1000),
            )
            if topics:
                client.subscribe(list(topics), listener=listener)
            self._client = client  # before it has started: the listener is called meanwhile
            await start_or_stop(client.start(), self._drop, connection.stop_timeout_seconds)
            if self._closed:
                await stop_bounded(client.stop(), connection.stop_timeout_seconds)
                self._check_open()

        await starting(connection, attempt)

    async def stop(self) -> None:
        """Also in the middle of `start`, which then ends with nothing left behind."""
        self._closed = True
        await self._drop()

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError("the consumer was stopped")

    async def _drop(self) -> None:
        client, self._client = self._client, None
        self._next.clear()
        if client is not None:
            await stop_bounded(client.stop(), self._connection.stop_timeout_seconds)

    def assignment(self) -> frozenset[TopicPartition]:
        if self._client is None:
            return frozenset()
        return frozenset(TopicPartition(*tp) for tp in self._client.assignment())

    def forget_positions(self) -> None:
        """After a rebalance the committed offset counts, not ours."""
        self._next.clear()

    def seek(self, tp: TopicPartition, offset: int) -> None:
        if tp in self.assignment():
            self._client.seek(KafkaTopicPartition(*tp), offset)
            self._next[tp] = offset

    async def fetch(self, tp: TopicPartition, max_records: int, timeout_seconds: float) -> Sequence[Record]:
        """As `Consumer.poll`; never cancelled by a timer of ours. A record that the client library cannot read (a
        header's name is not UTF-8), and what its producer sent behind it in one batch, come without their content, so
        that they are refused like any bad prompt and passed. A batch that is corrupt, or packed as nobody here knows,
        is not passed: once all in front of it has come, UnreadableRecordsError is raised."""
        client, foreign = self.client, KafkaTopicPartition(*tp)
        if tp not in self.assignment():
            return []
        try:
            with mapped_errors():
                try:
                    found = await client.getmany(
                        foreign, timeout_ms=int(timeout_seconds * 1000), max_records=max_records
                    )
                except Exception as error:  # decoders raise what they like; errors of the cluster go on
                    if isinstance(error, errors.KafkaError) and not isinstance(error, UNREADABLE):
                        raise
                    start = await client.position(foreign)  # unmoved, though the good records in front are gone
                    self.seek(tp, start)
                    if max_records > 1:
                        return await self.fetch(tp, 1, max(timeout_seconds, AGAIN_SECONDS))
                    if not isinstance(error, UnicodeDecodeError):
                        raise UnreadableRecordsError(f"{type(error).__name__} at offset {start}: {error}") from error
                    self.seek(tp, start + 1)
                    return [_unreadable(tp, start)]
        except BrokerError:
            for back, offset in list(self._next.items()):
                self.seek(back, offset)
            raise
        return self._taken(found.get(foreign, ()))

    async def fetch_any(self, tps: Collection[TopicPartition], timeout_seconds: float) -> Sequence[Record]:
        """As `Consumer.poll_any`. With one record at a time the library raises before it has taken any."""
        ours = self.assignment().intersection(tps)
        if not ours:
            await asyncio.sleep(timeout_seconds)
            return []
        try:
            found = await self.client.getmany(
                *self.foreign(ours), timeout_ms=int(timeout_seconds * 1000), max_records=1
            )
        except Exception:  # whatever it is, one partition is at fault, and its own fetch says which
            for tp in ours:
                if records := await self.fetch(tp, 1, 0):
                    return records
            return []
        return self._taken(record for records in found.values() for record in records)

    def _taken(self, found: Iterable[Any]) -> list[Record]:
        """The records as ours; the next fetch of their partition goes on behind them."""
        records = [
            Record(r.topic, r.partition, r.offset, r.timestamp, r.key, r.value, tuple(r.headers), r.timestamp_type == 1)
            for r in found
        ]
        if records:
            self._next[records[-1].tp] = records[-1].offset + 1
        return records

    async def position(self, tp: TopicPartition) -> int:
        return int(await self._bounded(lambda: self.client.position(KafkaTopicPartition(*tp))))

    async def starts(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        found = await self._bounded(lambda: self.client.beginning_offsets(self.foreign(tps)))
        return {TopicPartition(*tp): offset for tp, offset in found.items()}

    async def ends(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        found = await self._bounded(lambda: self.client.end_offsets(self.foreign(tps)))
        return {TopicPartition(*tp): offset for tp, offset in found.items()}

    async def at_time(self, tps: Collection[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int | None]:
        wanted = dict.fromkeys(self.foreign(tps), timestamp_ms)
        found = await self._bounded(lambda: self.client.offsets_for_times(wanted))
        return {TopicPartition(*tp): None if at is None else at.offset for tp, at in found.items()}

    async def _bounded(self, call: Any) -> Any:
        timeout = self._connection.request_timeout_seconds
        return await retrying(call, timeout, timeout)


def _unreadable(tp: TopicPartition, offset: int) -> Record:
    """What can be said of a record that the library raises on. Behind a gap it stands at the gap's first offset."""
    return Record(tp.topic, tp.partition, offset, int(time.time() * 1000), None, None, (), False)
