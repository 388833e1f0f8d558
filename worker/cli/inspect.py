"""`v4flash inspect`: where is my prompt? Reads topics and commits, asks no worker, shows no text."""

import sys
import time
from collections.abc import Collection
from contextlib import aclosing

from topics.headers import salvage_headers
from worker.broker.api import Broker, Record, TopicPartition
from worker.cli.terminal import shown_text
from worker.commit_metadata import EMPTY, MetadataCodec
from worker.doctor import prompt_topics, reply_topics
from worker.errors import SettingsError
from worker.letter import Letter, parse_letter
from worker.scan import scan
from worker.settings import Settings
from worker.whereabouts import Whereabouts, whereabouts

EXIT_ABSENT = 1


async def inspect_prompt(broker: Broker, settings: Settings, named: str) -> int:
    """Print what is known of each prompt with this id, or of the one at this place. Exit code 1 when there is none."""
    found = await find(broker, settings, named)
    for here in found:
        print(_told(here, int(time.time() * 1000)))
    if not found:
        print(f"v4flash: no prompt {named} is in the prompt topics (any more)", file=sys.stderr)
        return EXIT_ABSENT
    return 0


async def find(broker: Broker, settings: Settings, named: str) -> list[Whereabouts]:
    """`named` is a request id or TOPIC:PARTITION:OFFSET. Reads the prompt, reply and dead-letter topics whole. Raises
    SettingsError for a place that cannot be, BrokerError."""
    admin = broker.admin()
    await admin.start()
    try:
        counts = await admin.partition_counts()
        place = _place(named, counts.keys())
        among = [place[0].topic] if place else [name for name in prompt_topics(settings, counts) if name in counts]
        async with aclosing(scan(broker, among)) as records:
            prompts = [record async for record in records if _is_named(record, named, place)]
        if not prompts:
            return []
        commits = await admin.committed(settings.group_id, {prompt.tp for prompt in prompts})
        codec = MetadataCodec()
        codec.bind(await admin.cluster_id())
    finally:
        await admin.stop()
    named_topics = {salvage_headers(prompt.headers).reply_topic for prompt in prompts}
    readable = {*reply_topics(settings), settings.names.replies, *(topic for topic in named_topics if topic)}
    dead_letter, ids = settings.names.dead_letter, {request_id(prompt) for prompt in prompts}
    replies, letters = [], []
    async with aclosing(scan(broker, (readable | {dead_letter}) & counts.keys())) as records:
        async for record in records:
            if record.topic == dead_letter:
                letters += [letter for letter in [parse_letter(record)] if any(_is_of(letter, one) for one in prompts)]
            elif _text(record, "x-request-id") in ids and _text(record, "x-final") == "1":
                replies.append(record)
    found = []
    for prompt in prompts:
        commit = commits[prompt.tp]
        metadata = EMPTY
        if commit is not None:
            metadata = codec.decode(prompt.tp, commit.metadata, base=commit.offset, end=sys.maxsize)
        own = [reply for reply in replies if _text(reply, "x-request-id") == request_id(prompt)]
        found.append(whereabouts(prompt, commit, metadata, own, [one for one in letters if _is_of(one, prompt)]))
    return found


def request_id(prompt: Record) -> str:
    """The client's id, else the one made of its place."""
    return salvage_headers(prompt.headers).request_id or f"{prompt.topic}-{prompt.partition}-{prompt.offset}"


def _is_named(record: Record, named: str, place: tuple[TopicPartition, int] | None) -> bool:
    return request_id(record) == named if place is None else (record.tp, record.offset) == place


def _is_of(letter: Letter, prompt: Record) -> bool:
    return (letter.topic, letter.partition, letter.offset) == (prompt.topic, prompt.partition, prompt.offset)


def _place(named: str, topics: Collection[str]) -> tuple[TopicPartition, int] | None:
    topic, _, rest = named.partition(":")
    partition, _, offset = rest.partition(":")
    if not (partition.isdigit() and offset.isdigit()):
        return None
    if topic not in topics:
        raise SettingsError(f"there is no topic {topic}")
    return TopicPartition(topic, int(partition)), int(offset)


def _text(record: Record, name: str) -> str:
    return (dict(record.headers).get(name) or b"").decode("utf-8", "replace")


def _told(here: Whereabouts, now_ms: int) -> str:
    prompt, commit = here.prompt, here.commit
    committed = "nothing" if commit is None else str(commit.offset)
    age = max(0, now_ms - prompt.timestamp_ms) / 1000
    rows = [
        ("request", request_id(prompt)),
        ("prompt", f"{prompt.topic}:{prompt.partition}:{prompt.offset}, {len(prompt.value or b'')} bytes"),
        ("age", f"{age:.0f} s"),
        ("stage", here.stage),
        ("committed", f"{committed} of its partition"),
    ]
    for reply in here.replies:
        event, attempt = _text(reply, "x-event"), _text(reply, "x-attempt")
        rows.append(("reply", f"{reply.topic}:{reply.partition}:{reply.offset} {event}, attempt {attempt}"))
    rows += [("dead letter", f"{letter.place} {letter.reason}: {letter.message}") for letter in here.letters]
    return "\n".join(f"{name:12} {shown_text(said)}" for name, said in rows)


__all__ = ["find", "inspect_prompt"]
