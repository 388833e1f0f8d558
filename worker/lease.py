"""Prompts that a former owner still answers: what it says when it has, on the control topic, and who remembers it."""

import json
from collections import OrderedDict
from typing import NamedTuple

from worker.broker.api import Record, TopicPartition
from worker.control import control_body

MAX_REMEMBERED = 100_000


class Answered(NamedTuple):
    """A prompt that is dealt with. The record's timestamp tells it from one at the same place in another log."""

    tp: TopicPartition
    offset: int
    timestamp_ms: int

    @classmethod
    def of(cls, prompt: Record) -> "Answered":
        return cls(prompt.tp, prompt.offset, prompt.timestamp_ms)


def done_record(prompt: Record) -> tuple[bytes, bytes]:
    """Key and value of "this prompt is dealt with" on the control topic."""
    body = {"type": "done", "topic": prompt.topic, "partition": prompt.partition, "offset": prompt.offset}
    key = json.dumps(["done", prompt.topic, prompt.partition, prompt.offset]).encode()
    return key, json.dumps({**body, "timestamp_ms": prompt.timestamp_ms}).encode()


def parse_done(record: Record) -> Answered | None:
    """What a control record says to be dealt with; None for one that says nothing of the kind."""
    body = control_body(record, "done")
    if body is None or not isinstance(body.get("topic"), str):
        return None
    given = [body.get(name) for name in ("partition", "offset", "timestamp_ms")]
    numbers = [number for number in given if type(number) is int]
    if len(numbers) < len(given):
        return None
    partition, offset, timestamp_ms = numbers
    return Answered(TopicPartition(body["topic"], partition), offset, timestamp_ms)


class AnsweredBook:
    """The youngest `MAX_REMEMBERED`: a former owner may be done before the new one has read the prompt."""

    def __init__(self) -> None:
        self._answered: OrderedDict[Answered, None] = OrderedDict()

    def add(self, answered: Answered) -> None:
        self._answered[answered] = None
        if len(self._answered) > MAX_REMEMBERED:
            self._answered.popitem(last=False)

    def __contains__(self, answered: Answered) -> bool:
        return answered in self._answered
