"""What the worker needs of a broker: one Protocol, two implementations (`kafka`, `memory`), one contract suite."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class TopicPartition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


Headers = tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One consumed record. `timestamp_ms` is Unix time; `append_time` says that the broker stamped it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    append_time: bool = True

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


@dataclass(frozen=True, slots=True)
class OffsetCommit:
    """The next offset to read, and up to 3,000 characters of metadata."""

    offset: int
    metadata: str = ""


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create; `config` are Kafka topic settings."""

    name: str
    num_partitions: int = 1
    config: Mapping[str, str] | None = None


class BrokerError(Exception):
    """The broker did not do what was asked."""

    retriable = True


class BrokerUnavailableError(BrokerError):
    """The broker cannot be reached in time."""


class MessageTooLargeError(BrokerError):
    """The record is larger than the topic accepts."""

    retriable = False


class UnreadableRecordsError(BrokerError):
    """The next records of the partition cannot be read: corrupt, or packed in a way that nobody here knows."""


class TopicNotAvailableError(BrokerError):
    """The topic or partition does not exist, or may not be written."""

    retriable = False


PARTITION_ERRORS = (UnreadableRecordsError, TopicNotAvailableError)
"""What a poll raises of one partition or its topic: no other consumer has a better answer, and the others go on."""


class ProducerWedgedError(BrokerError):
    """The producer can never send again (fenced, out of order): replace it."""


class UnacknowledgedError(ProducerWedgedError):
    """The producer has accepted the record and may still write it, however late: it goes on, and what must not be there
    twice has to begin anew."""


class CommitRejectedError(BrokerError):
    """The group moved on (rebalance); the partitions are no longer ours."""


class RebalanceListener(Protocol):
    """Called by the broker around a rebalance; both return within a second and wait for no generation."""

    async def on_revoked(self, revoked: Collection[TopicPartition]) -> None: ...

    async def on_assigned(self, assigned: Collection[TopicPartition]) -> None: ...


class Consumer(Protocol):
    """A member of a consumer group. Only one task may call `poll`, and nothing cancels it by a timer."""

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Leave the group within a bounded time; does not call `on_revoked`; idempotent."""

    def assignment(self) -> frozenset[TopicPartition]: ...

    async def poll(self, tp: TopicPartition, max_records: int, timeout_seconds: float) -> Sequence[Record]:
        """Up to `max_records` in offset order; [] on timeout, or if `tp` is not assigned. On a failure the position is
        moved back so that no record is skipped, and BrokerError is raised: UnreadableRecordsError where only these
        records are at fault."""

    async def poll_any(self, tps: Collection[TopicPartition], timeout_seconds: float) -> Sequence[Record]:
        """The first record that is there or comes for one of `tps`; [] on timeout. Raises as `poll` does; the records
        that are at fault are found by asking each partition."""

    def pause(self, tps: Collection[TopicPartition]) -> None: ...

    def resume(self, tps: Collection[TopicPartition]) -> None: ...

    def seek(self, tp: TopicPartition, offset: int) -> None: ...

    async def commit(self, offsets: Mapping[TopicPartition, OffsetCommit]) -> None:
        """Raises CommitRejectedError, BrokerUnavailableError."""

    async def committed(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, OffsetCommit | None]: ...

    async def positions(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The next offset to be fetched of each, past the gaps that were seen."""

    async def end_offsets(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]: ...

    async def offsets_for_time(
        self, tps: Collection[TopicPartition], timestamp_ms: int
    ) -> dict[TopicPartition, int | None]: ...


class Reader(Protocol):
    """Reads whole topics from given positions, without a group."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def poll(self, max_records: int, timeout_seconds: float) -> Sequence[Record]: ...

    async def at_end(self) -> bool:
        """Whether everything that was there at the call has been polled."""


class Producer(Protocol):
    """Idempotent producer, acks=all."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> TopicPartition:
        """Returns when the broker has acknowledged. Sends of one caller to one partition keep their order.

        Raises MessageTooLargeError, TopicNotAvailableError, ProducerWedgedError, UnacknowledgedError,
        BrokerUnavailableError.
        """


class Admin(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def create_topics(self, topics: Sequence[NewTopic]) -> list[str]:
        """Names created now; those that exist already are left as they are."""

    async def delete_topics(self, names: Collection[str]) -> None: ...

    async def partition_counts(self, names: Collection[str] | None = None) -> dict[str, int]:
        """Topic -> number of partitions; all topics when `names` is None; absent topics are left out."""

    async def topic_configs(self, names: Collection[str]) -> dict[str, Mapping[str, str]]:
        """Settings by topic; absent topics and those that we may not see are left out."""

    async def committed(self, group: str, tps: Collection[TopicPartition]) -> dict[TopicPartition, OffsetCommit | None]:
        """What `group` has committed, with its metadata; None for a partition without."""

    async def cluster_id(self) -> str:
        """What tells this cluster from every other one; "" where the broker has no such name."""


class Broker(Protocol):
    """Makes clients of one cluster; the clients are started and stopped by who asked for them."""

    def consumer(self, group: str, topics: Sequence[str], listener: RebalanceListener) -> Consumer: ...

    def reader(self, topics: Sequence[str], *, from_beginning: bool) -> Reader: ...

    def producer(self) -> Producer: ...

    def admin(self) -> Admin: ...
