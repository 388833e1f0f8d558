"""The broker contract on Apache Kafka: makes clients of one cluster from one frozen connection.

The only files that know aiokafka are this one and its siblings `kafka_*`.
"""

from collections.abc import Sequence

from worker.broker.api import RebalanceListener
from worker.broker.kafka_admin import KafkaAdmin
from worker.broker.kafka_connection import KafkaConnection
from worker.broker.kafka_consumer import KafkaConsumer
from worker.broker.kafka_producer import KafkaProducer
from worker.broker.kafka_reader import KafkaReader

__all__ = ["KafkaBroker", "KafkaConnection"]


class KafkaBroker:
    """See `worker.broker.api.Broker`."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection

    def consumer(self, group: str, topics: Sequence[str], listener: RebalanceListener) -> KafkaConsumer:
        return KafkaConsumer(self._connection, group, topics, listener)

    def reader(self, topics: Sequence[str], *, from_beginning: bool) -> KafkaReader:
        return KafkaReader(self._connection, topics, from_beginning=from_beginning)

    def producer(self) -> KafkaProducer:
        return KafkaProducer(self._connection)

    def admin(self) -> KafkaAdmin:
        return KafkaAdmin(self._connection)
