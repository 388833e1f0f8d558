import asyncio
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from topics.routes import Route, RouteTable
from worker.broker.api import BrokerUnavailableError, NewTopic
from worker.clock import SystemClock
from worker.subscription import Subscription, UnequalPartitionsError
from worker.watchdog import Watchdog


async def test_unequal_partition_counts_are_refused_at_the_start(rig):
    """The message names each topic and its count; not every worker would hold every class."""
    await rig.broker.admin().delete_topics([rig.names.prompts("bulk")])
    await rig.broker.create_topics(NewTopic(rig.names.prompts("bulk"), 3))
    with pytest.raises(UnequalPartitionsError, match=r"prompts.bulk has 3.*prompts.standard has 2"):
        await rig.serve_all()


async def test_topics_that_a_pattern_matches_are_served_with_its_tenant(rig, prompt):
    """A route of a regular expression, beside one of names."""
    await rig.broker.create_topics(NewTopic("tenants.acme.prompts", 1), NewTopic("tenants.acme.other", 1))
    routes = RouteTable(
        routes=(
            Route(topics=rig.names.all_prompts),
            Route(pattern=r"tenants\.(?P<tenant>[a-z]+)\.prompts", reply_mode="chunks"),
        )
    )
    await rig.producer.send("tenants.acme.prompts", b'{"messages":[{"role":"user","content":"hi"}]}')
    await rig.send(prompt(), x_request_id="named")
    await rig.serve_all(routes=routes)
    assert rig.answer("tenants.acme.prompts-0-0")
    assert len(rig.replies("tenants.acme.prompts-0-0")) > 1
    assert rig.answer("named")


async def test_a_topic_that_comes_later_is_served_and_what_runs_is_not_repeated(rig, prompt):
    """The worker joins the group again with the new topic while a stream of an old one runs."""
    routes = RouteTable(routes=(Route(topics=rig.names.all_prompts), Route(pattern=r"tenants\.[a-z]+")))
    app = rig.app(routes=routes)
    async with rig.running(app):
        await rig.send(prompt("[[slow]] [[tokens=12]]", stream=True), x_request_id="old")
        await rig.until_replied("old")
        await rig.broker.create_topics(NewTopic("tenants.acme", 1))
        await rig.producer.send("tenants.acme", b'{"messages":[{"role":"user","content":"hi"}]}')
        await app.member.subscription.refresh()
        await rig.until_replied("tenants.acme-0-0")
    assert rig.answer("tenants.acme-0-0")
    assert sum("x-final" in reply.headers for reply in rig.replies("old")) == 1
    assert await rig.uncommitted() == {}


async def test_a_new_topic_is_joined_again_after_a_start_that_failed():
    """A broker that was away for a moment does not leave the worker without a consumer."""
    counts, joined, failing = {"tenants.a": 1}, [], [False, True, False]

    def join(topics, listener):
        async def start() -> None:
            if failing[len(joined) - 1]:
                raise BrokerUnavailableError

        async def stop() -> None: ...

        joined.append(topics)
        return SimpleNamespace(start=start, stop=stop, assignment=frozenset)

    async def partition_counts() -> dict[str, int]:
        return counts

    async def on_revoked(revoked) -> None: ...

    subscription = Subscription(
        join,
        SimpleNamespace(on_revoked=on_revoked),
        RouteTable(routes=(Route(pattern=r"tenants\.[a-z]+"),)),
        SimpleNamespace(partition_counts=partition_counts),
        watchdog=Watchdog(SystemClock(), frozenset),
    )
    await subscription.start()
    counts["tenants.b"] = 1
    with pytest.raises(BrokerUnavailableError):
        await subscription.refresh()
    await subscription.refresh()
    assert joined == [["tenants.a"], ["tenants.a", "tenants.b"], ["tenants.a", "tenants.b"]]


async def test_matched_topics_with_fewer_partitions_are_named_and_served(rig, prompt):
    """At the start and when one comes later; whoever may create a topic cannot stop the workers with it."""
    await rig.broker.create_topics(NewTopic("tenants.a", 1), NewTopic("tenants.b", 2))
    routes = RouteTable(routes=(Route(topics=rig.names.all_prompts), Route(pattern=r"tenants\.[a-z]+")))
    with capture_logs() as logs:
        app = rig.app(routes=routes)
        async with rig.running(app):
            await rig.producer.send("tenants.a", prompt())
            await rig.until_replied("tenants.a-0-0")
            await rig.broker.create_topics(NewTopic("tenants.c", 1))
            await app.member.subscription.refresh()
    told = [line["topics"] for line in logs if line["event"].startswith("topics with fewer partitions")]
    assert told == [{"tenants.a": 1}, {"tenants.a": 1, "tenants.c": 1}]


class Members:
    """Consumers that join when they have started; each start and stop takes a pass, and waits for one."""

    def __init__(self) -> None:
        self.joined: set[int] = set()
        self.num_made = 0
        self.passes, self.waiting = asyncio.Semaphore(1), asyncio.Event()

    def join(self, topics, listener):
        number = self.num_made = self.num_made + 1

        async def passing() -> None:
            if self.passes.locked():
                self.waiting.set()
            await self.passes.acquire()

        async def start() -> None:
            await passing()
            self.joined.add(number)

        async def stop() -> None:
            await passing()
            self.joined.discard(number)

        return SimpleNamespace(start=start, stop=stop, assignment=frozenset)


async def changing() -> tuple[Members, Subscription, dict[str, int]]:
    """A subscription that has joined, and whose next change waits for a pass."""
    members, counts = Members(), {"tenants.a": 1}

    async def partition_counts() -> dict[str, int]:
        return counts

    async def on_revoked(revoked) -> None: ...

    subscription = Subscription(
        members.join,
        SimpleNamespace(on_revoked=on_revoked),
        RouteTable(routes=(Route(pattern=r"tenants\.[a-z]+"),)),
        SimpleNamespace(partition_counts=partition_counts),
        watchdog=Watchdog(SystemClock(), frozenset),
    )
    await subscription.start()
    counts["tenants.b"] = 1
    return members, subscription, counts


@pytest.mark.parametrize(("one", "other"), [("renew", "refresh"), ("refresh", "renew"), ("renew", "renew")])
async def test_changes_that_overlap_leave_one_member_in_the_group(one, other):
    """A second one that nobody polls would hold partitions for ever."""
    members, subscription, _ = await changing()
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        tasks.create_task(getattr(subscription, one)())
        await members.waiting.wait()
        tasks.create_task(getattr(subscription, other)())
        await asyncio.sleep(0)
        for _ in range(10):
            members.passes.release()
    assert members.joined == {members.num_made}
    assert subscription.joined


@pytest.mark.parametrize("change", ["renew", "refresh"])
@pytest.mark.parametrize("num_passed", [0, 1])
async def test_who_hands_over_in_the_middle_of_a_change_leaves_the_group(change, num_passed):
    """The change does not bring it back, whether it was leaving the group or joining it."""
    members, subscription, _ = await changing()
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        tasks.create_task(getattr(subscription, change)())
        await members.waiting.wait()
        for _ in range(num_passed):
            members.waiting.clear()
            members.passes.release()
            await members.waiting.wait()
        tasks.create_task(subscription.hand_over())
        for _ in range(3):
            await asyncio.sleep(0)
        for _ in range(10):
            members.passes.release()
    assert members.joined == set()
