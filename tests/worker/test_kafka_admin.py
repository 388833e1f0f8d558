"""What a cluster says of a group, where the Kafka library is silent about errors."""

from aiokafka import TopicPartition as KafkaTopicPartition
from aiokafka.structs import OffsetAndMetadata

from worker.broker.api import OffsetCommit, TopicPartition
from worker.broker.kafka_admin import KafkaAdmin
from worker.broker.kafka_connection import KafkaConnection

ONE, TWO = TopicPartition("t", 0), TopicPartition("t", 1)


class Moving:
    """A coordinator that has moved at first: the library then gives nothing, and no error."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def list_consumer_group_offsets(self, group, partitions):
        self.num_asked += 1
        if self.num_asked == 1:
            return {}
        none = OffsetAndMetadata(-1, "")
        return {KafkaTopicPartition(*ONE): OffsetAndMetadata(5, "done"), KafkaTopicPartition(*TWO): none}


async def test_a_coordinator_that_has_moved_is_asked_again():
    """Its silence is not taken for a group that has committed nothing: the worker would begin a day back."""
    admin, client = KafkaAdmin(KafkaConnection("127.0.0.1:1")), Moving()
    admin._client = client
    assert await admin.committed("g", [ONE, TWO]) == {ONE: OffsetCommit(5, "done"), TWO: None}
    assert client.num_asked == 2


async def test_nothing_is_asked_of_no_partitions():
    """A member without partitions asks for none, and that is answered."""
    admin = KafkaAdmin(KafkaConnection("127.0.0.1:1"))

    class Empty:
        async def list_consumer_group_offsets(self, group, partitions):
            return {}

    admin._client = Empty()
    assert await admin.committed("g", []) == {}
