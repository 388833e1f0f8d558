"""What is told of one partition that is behind."""

from dataclasses import dataclass

from worker.broker.api import TopicPartition


@dataclass(frozen=True, slots=True)
class PartitionBacklog:
    """`oldest_seconds` is the age of the oldest prompt without an answer, 0 without one; `tokens` estimates the
    prompts without an answer; `seconds_to_loss` is until retention drops the oldest, None while nothing can be lost."""

    tp: TopicPartition
    oldest_seconds: float
    tokens: int
    seconds_to_loss: float | None
