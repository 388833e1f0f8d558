"""The topics of one worker group, as they have to be: equal partition counts, times stamped by the broker."""

from topics.names import TopicNames
from worker.broker.api import Admin, NewTopic

DEFAULT_PARTITIONS = 12
RECORD_OVERHEAD_BYTES = 65_536


def topics_of(names: TopicNames, *, max_body_bytes: int, num_partitions: int = DEFAULT_PARTITIONS) -> list[NewTopic]:
    """Prompt topics of the three classes, control, shared replies and dead letters."""
    config = {
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(max_body_bytes + RECORD_OVERHEAD_BYTES),
    }
    spread = [*names.all_prompts, names.replies, names.dead_letter]
    return [NewTopic(name, num_partitions, config) for name in spread] + [
        NewTopic(names.control, 1, config | {"cleanup.policy": "compact,delete"})
    ]


async def create_topics(admin: Admin, topics: list[NewTopic]) -> list[str]:
    """Create what is missing; returns the names created now."""
    await admin.start()
    try:
        return await admin.create_topics(topics)
    finally:
        await admin.stop()
