"""`order: key`: one prompt of a key at a time, in the order of their offsets."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scripted import ScriptedEngine
from topics.names import TopicNames
from topics.routes import Route, RouteTable
from worker.broker.api import Record
from worker.key_order import KeyOrder

NAMES = TopicNames()
ROUTES = RouteTable(routes=(Route(topics=NAMES.all_prompts, order="key"),))


def record(offset: int, key: bytes | None, value: bytes | None = b"{}", partition: int = 0) -> Record:
    return Record("t", partition, offset, 0, key, value)


def test_the_first_of_each_key_may_start_and_the_next_when_it_has_ended() -> None:
    """Other keys, other partitions and records without a key do not wait."""
    order = KeyOrder(lambda topic: True)
    waiting = [record(3, b"a"), record(1, b"a"), record(2, b"b"), record(4, None), record(5, None)]
    waiting.append(record(6, b"a", partition=1))
    may = order.may_start(waiting)
    assert [one.offset for one in waiting if may(one)] == [1, 2, 4, 5, 6]
    order.started(waiting[1])
    may = order.may_start([record(3, b"a")])
    assert not may(record(3, b"a"))
    order.ended(record(3, b"a"))
    assert not order.may_start([record(3, b"a")])(record(3, b"a"))
    order.ended(record(1, b"a"))
    assert order.may_start([record(3, b"a")])(record(3, b"a"))


def test_a_cancel_does_not_wait_for_what_it_cancels() -> None:
    """It has no value, and may have the prompt's key."""
    order = KeyOrder(lambda topic: True)
    order.started(record(1, b"a"))
    cancel = record(2, b"a", value=None)
    assert order.may_start([cancel])(cancel)


def test_topics_without_order_have_none() -> None:
    """The default."""
    order = KeyOrder(lambda topic: False)
    order.started(record(1, b"a"))
    assert order.may_start([record(2, b"a")])(record(2, b"a"))


@given(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=30), st.randoms())
def test_in_any_interleaving_each_key_runs_in_order_one_at_a_time(keys: list[bytes], random) -> None:
    """And everything runs in the end."""
    order = KeyOrder(lambda topic: True)
    waiting = [record(offset, key) for offset, key in enumerate(keys)]
    running: list[Record] = []
    begun: dict[bytes, list[int]] = {}
    while waiting or running:
        may = order.may_start(waiting)
        free = [one for one in waiting if may(one)]
        if free and (not running or random.random() < 0.5):
            chosen = random.choice(free)
            assert all(one.key != chosen.key for one in running)
            waiting.remove(chosen)
            running.append(chosen)
            order.started(chosen)
            begun.setdefault(chosen.key or b"", []).append(chosen.offset)
        else:
            ended = running.pop(random.randrange(len(running)))
            order.ended(ended)
    assert all(offsets == sorted(offsets) for offsets in begun.values())
    assert sum(map(len, begun.values())) == len(keys)


@pytest.mark.parametrize("order", ["key", "none"])
async def test_a_worker_keeps_the_order_of_a_key(rig, prompt, order):
    """The slow one first: with the order its answer comes first, without it last. Another key waits for neither."""
    routes = RouteTable(routes=(Route(topics=NAMES.all_prompts, order=order),))
    for name, key, text in (
        ("slow", b"session", "[[tokens=30]] a"),
        ("quick", b"session", "[[tokens=1]] b"),
        ("bad", b"session", ""),
        ("last", b"session", "[[tokens=1]] c"),
        ("other", b"elsewhere", "[[tokens=1]] d"),
    ):
        body = {"max_tokens": 0} if name == "bad" else prompt(text)
        await rig.producer.send(
            NAMES.prompts("bulk"),
            json.dumps(body).encode(),
            key=key,
            headers=(("x-request-id", name.encode()),),
            partition=0,
        )
    await rig.serve_all(ScriptedEngine(tokens_per_second=200), routes=routes)
    ends = [dict(one.headers)["x-request-id"].decode() for one in rig.broker.records(NAMES.replies)]
    ours = [name for name in ends if name != "other"]
    partitions = {one.partition for one in rig.broker.records(NAMES.replies) if one.key == b"session"}
    assert len(partitions) == 1
    if order == "key":
        assert ours == ["slow", "quick", "bad", "last"]
    else:
        assert ours[-1] == "slow"
    assert await rig.uncommitted() == {}


async def test_the_order_survives_a_restart(rig, prompt):
    """What a worker left running is answered by the next one before the later prompt of its key."""
    for name in ("first", "second"):
        await rig.producer.send(
            NAMES.prompts("bulk"),
            json.dumps(prompt(f"[[slow]] [[tokens=4]] {name}")).encode(),
            key=b"session",
            headers=(("x-request-id", name.encode()),),
        )
    app = rig.app(ScriptedEngine(), routes=ROUTES, grace_seconds=0.01)
    async with rig.running(app):
        await app.member.assignment.known.wait()
    await rig.serve_all(routes=ROUTES)
    ends = [dict(one.headers)["x-request-id"] for one in rig.broker.records(NAMES.replies)]
    assert ends == [b"first", b"second"]
