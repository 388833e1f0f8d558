"""Members come and go, and topics change under the workers that use them."""

import asyncio
import time

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from worker.broker.api import NewTopic

pytestmark = [pytest.mark.drill, pytest.mark.timeout(420)]

STREAM = "tell [[tokens=60]] [[slow]]"
SHORT = "tell [[tokens=20]]"


async def test_members_that_join_and_leave_every_five_seconds(kafka, ledger, workers, passed):
    """For a minute, with prompts all the time; nothing is lost, a clean leave repeats little, and the worker that
    stays goes on taking prompts."""
    stays = workers.start(kafka.bootstrap_servers)
    await workers.until_serving(stays)
    await ledger.send(12, SHORT)
    await ledger.until_settled()
    ledger.fault()
    began, visitor, num_changes, gaps = time.monotonic(), None, 0, Gaps()
    while time.monotonic() < began + 60 or num_changes < 8:
        if visitor is None:
            visitor = workers.start(kafka.bootstrap_servers)
            await during(workers.until_serving(visitor), ledger, stays, gaps)
        else:
            assert await during(workers.end(visitor), ledger, stays, gaps) == 0
            visitor = None
        num_changes += 1
        await during(asyncio.sleep(5.0), ledger, stays, gaps)
    await ledger.until_settled()
    await ledger.until_committed()
    assert gaps.longest_seconds < 3.0, gaps
    assert {await workers.end(worker) for worker in workers.all if worker.runs} == {0}
    fault = f"{num_changes} times a member joins or leaves (intake gap {gaps.longest_seconds:.1f} s)"
    passed(fault, max_duplicates=len(ledger.entries) // 20)


class Gaps:
    """The longest time in which a worker took no prompt."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._taken, self._since = 0, time.monotonic()

    def __repr__(self) -> str:
        return f"Gaps(longest={self.longest_seconds:.1f} s)"

    def seen(self, taken: int) -> None:
        now = time.monotonic()
        if taken != self._taken:
            self._taken, self._since = taken, now
        self.longest_seconds = max(self.longest_seconds, now - self._since)


async def during(change, ledger, stays, gaps):
    """Prompts to every partition, several times a second, until the change is made."""
    changing = asyncio.ensure_future(change)
    while not changing.done():
        await ledger.send(4, SHORT, mode="final")
        await ledger.read(0.2)
        gaps.seen(await stays.metric("v4flash_records_polled_total"))
    return changing.result()


async def test_a_reply_topic_deleted_under_its_stream(kafka, ledger, workers, passed):
    """The requests that named it end as dead letters; the others stream on, and everything is committed."""
    doomed = f"{ledger.names.replies}.doomed"
    admin = ledger.broker.admin()
    await admin.start()
    await admin.create_topics([NewTopic(doomed)])
    workers.start(kafka.bootstrap_servers, reply_give_up_seconds=20)
    lost_on_purpose = await ledger.send_unread(4, STREAM, doomed)
    await ledger.send(12, STREAM)
    await ledger.until_streaming(12)
    ledger.fault()
    await admin.delete_topics([doomed])
    await ledger.until_settled()
    await ledger.send(12, SHORT)
    await ledger.until_settled()
    await ledger.until_dead_letters(lost_on_purpose, seconds=60.0)
    await ledger.until_committed(seconds=60.0)
    assert workers.all[0].runs
    assert await workers.end(workers.all[0]) == 0
    await admin.stop()
    passed("reply topic deleted while others run")


async def test_a_prompt_topic_deleted_while_others_run(kafka, ledger, workers, passed):
    """Its prompts are gone with it; those of the other classes are answered, and when it is made anew its are too."""
    worker = workers.start(kafka.bootstrap_servers)
    await ledger.send(12, SHORT, cls="bulk")
    await ledger.send(12, STREAM)
    await ledger.until_streaming(12)
    ledger.fault()
    admin = ledger.broker.admin()
    await admin.start()
    bulk = ledger.names.prompts("bulk")
    await admin.delete_topics([bulk])
    await ledger.send(24, SHORT)
    await ledger.send(24, SHORT, cls="urgent")
    others = [entry for entry in ledger.entries.values() if entry.where.topic != bulk]
    await ledger.until(lambda: all(entry.answer.settled for entry in others), seconds=90, what="the other classes")
    gone = [name for name, entry in ledger.entries.items() if entry.where.topic == bulk]
    ledger.drop([name for name in gone if not ledger.entries[name].answer.settled])
    assert worker.runs, worker.log.read_text()[-3000:]
    await admin.create_topics([NewTopic(bulk, 12, {"message.timestamp.type": "LogAppendTime"})])
    await admin.stop()
    await asyncio.sleep(4.0)  # the ledger's own producer looks for topics every three seconds
    again = await ledger.send(12, SHORT, cls="bulk")
    await ledger.until_settled(seconds=120.0)
    assert all(ledger.entries[name].right for name in again)
    ledger.commits.clear()  # the new topic begins at 0
    for name in gone:
        ledger.entries.pop(name, None)
    await ledger.until_committed(seconds=60.0)
    assert await workers.end(worker) == 0
    passed("prompt topic deleted while others run")


async def test_metadata_copied_under_a_lower_offset(kafka, ledger, workers, passed):
    """A mirror did it: what it says of another offset is not believed, so that nothing is taken for done."""
    first = workers.start(kafka.bootstrap_servers)
    ledger.num_partitions = 1
    await ledger.send(8, SHORT)
    await ledger.until_settled()
    await ledger.until_committed()
    await ledger.send(1, "tell [[tokens=400]] [[slow]]")
    await ledger.send(8, SHORT)
    await ledger.until(lambda: ledger.num_settled == 16, seconds=90, what="all but the slow one")
    await ledger.read(2.0)  # a commit comes twice a second
    (where,) = {entry.where for entry in ledger.entries.values()}
    made = await ledger.commit_of(where)
    assert made.offset == 8
    assert made.metadata
    ledger.fault()
    await workers.kill(first)
    await asyncio.sleep(8.0)  # the group forgets the member that was killed
    await ledger.commit(where, 4, made.metadata)
    ledger.commits.clear()
    second = workers.start(kafka.bootstrap_servers)
    await ledger.until_settled()
    await ledger.until_committed()
    assert await workers.end(second) == 0
    assert ledger.num_twice >= 12
    passed("metadata copied under a lower offset", max_duplicates=12)


async def test_the_partition_count_raised_while_running(kafka, ledger, workers, passed):
    """Prompts on the new partitions are answered without a restart."""
    workers.start(kafka.bootstrap_servers)
    await ledger.send(12, STREAM)
    await ledger.until_streaming(12)
    ledger.fault()
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await admin.start()
    await admin.create_partitions({topic: NewPartitions(18) for topic in ledger.names.all_prompts})
    await admin.close()
    ledger.num_partitions = 18
    await asyncio.sleep(4.0)  # the ledger's own producer counts partitions every three seconds
    await ledger.send(18, SHORT)
    await ledger.until_settled(seconds=120.0)
    await ledger.until_committed()
    assert max(entry.where.partition for entry in ledger.entries.values()) == 17
    assert await workers.end(workers.all[0]) == 0
    passed("partition count raised while running", max_duplicates=12)


async def test_prompts_of_an_aborted_transaction_are_not_answered(kafka, ledger, workers, passed):
    """They are no prompts; those after them are answered, and the commit passes the gap."""
    workers.start(kafka.bootstrap_servers)
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap_servers, transactional_id=ledger.names.prefix)
    await producer.start()
    await producer.begin_transaction()
    topic = ledger.names.prompts("standard")
    for partition in range(12):
        body = b'{"messages":[{"role":"user","content":"aborted"}]}'
        await producer.send_and_wait(topic, body, partition=partition, headers=[("x-request-id", b"aborted")])
    await ledger.send(12, SHORT)
    ledger.fault()
    await producer.abort_transaction()
    await producer.stop()
    await ledger.until_settled()
    await ledger.until_committed()
    await ledger.read(1.0)
    assert ledger.num_unknown_replies == 0
    assert await workers.end(workers.all[0]) == 0
    passed("a transaction aborted")
