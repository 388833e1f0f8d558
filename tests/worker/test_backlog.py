"""How far behind a partition is, and what is told of it."""

import asyncio
import json

from engine.scripted import ScriptedEngine
from topics.routes import Route, RouteTable
from worker.backlog import Backlog, BacklogWatch
from worker.broker.api import NewTopic, Record, TopicPartition
from worker.clock import SystemClock
from worker.metrics import MAX_PARTITIONS, Metrics
from worker.offsets import OffsetTracker
from worker.partition_backlog import PartitionBacklog
from worker.partition_state import PartitionStart

TP = TopicPartition("t", 0)


def polled(*timestamps: int) -> tuple[Backlog, OffsetTracker]:
    """One prompt of 11 tokens at each time, waiting."""
    tracker = OffsetTracker(max_inflight_per_partition=8)
    tracker.assign({TP: PartitionStart(0)})
    backlog = Backlog(tracker)
    records = [Record("t", 0, at, ms, None, b"x" * 40) for at, ms in enumerate(timestamps)]
    for record in records:
        tracker.arrived(TP, record.offset)
    backlog.polled(TP, records)
    return backlog, tracker


def measured(backlog: Backlog, *, end: int, position: int, now_ms: int, retention: int | None = 100_000):
    limits = {} if retention is None else {"t": retention}
    (one,) = backlog.measure({TP: position}, {TP: end}, limits, now_ms)
    return one


def test_the_oldest_prompt_counts_until_it_is_answered_and_also_when_later_ones_are() -> None:
    """Answers come out of order; the age is that of the oldest without one."""
    backlog, tracker = polled(1_000, 2_000, 3_000)
    for offset in range(3):
        tracker.started(TP, offset)
    tracker.finished(TP, 1)
    assert measured(backlog, end=3, position=3, now_ms=11_000) == PartitionBacklog(TP, 10.0, 22, 90.0)
    tracker.finished(TP, 0)
    assert measured(backlog, end=3, position=3, now_ms=11_000) == PartitionBacklog(TP, 8.0, 11, 92.0)
    tracker.finished(TP, 2)
    assert measured(backlog, end=3, position=3, now_ms=11_000) == PartitionBacklog(TP, 0.0, 0, None)


def test_what_was_never_polled_is_as_old_as_the_youngest_that_was() -> None:
    """It cannot be older than that, and is of about its size."""
    backlog, tracker = polled(*[1_000] * 200)
    for offset in range(200):
        tracker.started(TP, offset)
        tracker.finished(TP, offset)
    assert measured(backlog, end=300, position=200, now_ms=61_000) == PartitionBacklog(TP, 60.0, 1100, 40.0)


def test_a_topic_that_keeps_everything_loses_nothing() -> None:
    """No figure instead of a large one."""
    backlog, _ = polled(1_000)
    assert measured(backlog, end=1, position=1, now_ms=2_000, retention=None).seconds_to_loss is None


def test_a_partition_that_left_is_told_no_more_and_never_more_than_the_bound() -> None:
    """A new measurement replaces the one before."""
    metrics, value = Metrics(), "v4flash_partition_oldest_unfinished_seconds"
    many = [PartitionBacklog(TopicPartition("t", i), float(i), 1, 5.0) for i in range(MAX_PARTITIONS + 10)]
    metrics.observe_backlog(many)
    assert metrics.exposition().decode().count(f"{value}{{") == MAX_PARTITIONS
    assert metrics.registry.get_sample_value(value, {"topic": "t", "partition": "9"}) is None
    metrics.observe_backlog(many[:1])
    assert metrics.exposition().decode().count(f"{value}{{") == 1


async def test_a_worker_tells_what_waits_in_its_partitions(rig, prompt):
    """The prompt that stands counts, the one behind it that was answered does not."""
    await rig.broker.create_topics(NewTopic("jobs", 1, {"retention.ms": "3600000"}))
    routes, metrics = RouteTable(routes=(Route(topics=("jobs",)),)), Metrics()
    for text in ("[[stall]]", "hello"):
        value = json.dumps(prompt(text)).encode()
        await rig.producer.send("jobs", value, headers=(("x-request-id", text.encode()),))
    app = rig.app(ScriptedEngine(), routes=routes, grace_seconds=0.1, first_token_timeout_ms=60_000)
    async with rig.running(app):
        await rig.until_replied("hello")
        watch = BacklogWatch(
            app._backlog, app.member.assignment, app.member.subscription, rig.broker.admin(), SystemClock(), metrics
        )
        await watch.look()
    value = metrics.registry.get_sample_value
    told = {"topic": "jobs", "partition": "0"}
    assert 10 < value("v4flash_partition_backlog_tokens", told) < 40
    assert 3500 < value("v4flash_partition_seconds_to_retention_loss", told) <= 3600


async def test_an_end_that_is_a_gap_is_no_backlog_and_is_committed(rig, prompt, monkeypatch):
    """The marker of a transaction behind the last prompt: nothing will ever come of it; what runs is not passed."""
    monkeypatch.setattr("worker.intake.GAP_SECONDS", 0.0)
    await rig.broker.create_topics(NewTopic("jobs", 1))
    routes, metrics, jobs = RouteTable(routes=(Route(topics=("jobs",)),)), Metrics(), TopicPartition("jobs", 0)
    for text in ("[[slow]] [[tokens=8]]", "hello"):
        value = json.dumps(prompt(text)).encode()
        await rig.producer.send("jobs", value, headers=(("x-request-id", text.encode()),))
    app = rig.app(ScriptedEngine(), routes=routes)
    watch = BacklogWatch(
        app._backlog, app.member.assignment, app.member.subscription, rig.broker.admin(), SystemClock(), metrics
    )
    offsets, changes = rig.broker._cluster.group("workers").offsets, rig.broker._cluster.changes
    async with rig.running(app):
        await rig.until_replied("hello")
        rig.broker.leave_gap(jobs, 3)
        async with asyncio.timeout(5):
            while app.member.assignment.positions[jobs] < 5:
                await changes.wait_for(lambda: False, 0.02)
        assert app.member.tracker.watermark(jobs) == 0
        await rig.until_replied("[[slow]] [[tokens=8]]")
        assert await changes.wait_for(lambda: offsets[jobs].offset == 5, 5.0)
        await watch.look()
        value = json.dumps(prompt("after")).encode()
        await rig.producer.send("jobs", value, headers=(("x-request-id", b"after"),))
        await rig.until_replied("after")
    assert (
        metrics.registry.get_sample_value("v4flash_partition_backlog_tokens", {"topic": "jobs", "partition": "0"}) == 0
    )
    assert offsets[jobs].offset == 6
