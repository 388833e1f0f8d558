"""What a tenant may take of one worker, and what is said to one that takes more."""

import pytest

from topics.names import TopicNames
from topics.routes import Route, RouteTable
from worker.broker.api import NewTopic
from worker.ended import RateLimited
from worker.quotas import Quotas, TenantQuota


def quotas(**limits: float) -> Quotas:
    return Quotas({"acme": TenantQuota(**limits)})


def test_requests_pass_at_the_rate_and_the_error_says_when_the_next_one_will():
    """A burst of one second's worth, then one each half second; waiting as told is enough."""
    book = quotas(requests_per_second=2)
    book.request("acme", 10.0)
    book.request("acme", 10.0)
    with pytest.raises(RateLimited) as refused:
        book.request("acme", 10.25)
    assert refused.value.retriable
    assert refused.value.retry_after_ms == 250
    book.request("acme", 10.25 + refused.value.retry_after_ms / 1000)
    book.request("other", 10.25)


def test_a_slow_rate_lets_one_request_pass_now_and_then():
    """Less than one a second is a burst of one."""
    book = quotas(requests_per_second=0.1)
    book.request("acme", 0.0)
    with pytest.raises(RateLimited) as refused:
        book.request("acme", 5.0)
    assert refused.value.retry_after_ms == 5000
    book.request("acme", 10.0)


def test_tokens_are_given_back_however_a_request_ends():
    """And a request larger than the quota hears that waiting does not help."""
    book = quotas(concurrent_tokens=100)
    with pytest.raises(ZeroDivisionError), book.tokens("acme", 60):
        with pytest.raises(RateLimited) as full, book.tokens("acme", 41):
            pytest.fail("it ran")
        assert full.value.retriable
        raise ZeroDivisionError
    with book.tokens("acme", 100):
        pass
    with pytest.raises(RateLimited) as never, book.tokens("acme", 101):
        pytest.fail("it ran")
    assert (never.value.retriable, never.value.retry_after_ms) == (False, None)


def test_a_reply_topic_counts_once_and_for_an_hour_after_its_last_use():
    """The tenth answer to one topic is not a tenth topic."""
    book = quotas(reply_topics=2)
    for now, topic in ((0.0, "a"), (1.0, "b"), (10.0, "a")):
        book.reply_topic("acme", topic, now)
    with pytest.raises(RateLimited) as refused:
        book.reply_topic("acme", "c", 11.0)
    assert refused.value.retry_after_ms == 3_590_000
    book.reply_topic("acme", "c", 3601.0)
    with pytest.raises(RateLimited):
        book.reply_topic("acme", "b", 3601.0)


def test_the_star_is_a_quota_for_each_other_tenant_by_itself():
    """Nobody uses up what another one may."""
    book = Quotas({"*": TenantQuota(requests_per_second=1), "gold": TenantQuota()})
    for tenant in ("one", "two", "gold", "gold"):
        book.request(tenant, 0.0)
    with pytest.raises(RateLimited):
        book.request("one", 0.0)


ROUTES = RouteTable(
    routes=(
        Route(topics=(TopicNames().prompts("bulk"),), priority="bulk", tenant="acme"),
        Route(topics=(TopicNames().prompts("standard"), TopicNames().prompts("urgent")), tenant="other"),
    )
)


async def test_a_request_over_the_rate_is_told_so_and_others_are_served(rig, prompt):
    """The error can be retried, says when, and costs no dead letter and no other tenant."""
    await rig.send(prompt(), "bulk", x_request_id="one")
    await rig.send(prompt(), "bulk", x_request_id="two")
    await rig.send(prompt(), "standard", x_request_id="elsewhere")
    quota = {"acme": {"requests_per_second": 0.01}}
    await rig.serve_all(routes=ROUTES, tenant_quotas=quota)
    served = [name for name in ("one", "two") if rig.replies(name)[0].headers["x-event"] == b"final"]
    (refused,) = {"one", "two"} - set(served)
    assert rig.error(refused) == "rate_limited"
    reply = rig.replies(refused)[0]
    assert reply.body["error"]["type"] == "rate_limit_error"
    assert reply.headers["x-retriable"] == b"1"
    assert 0 < int(reply.headers["x-retry-after-ms"]) <= 100_000
    assert rig.answer("elsewhere")
    assert rig.dead_letters() == []
    assert await rig.uncommitted() == {}


async def test_a_request_larger_than_the_tenants_tokens_is_refused_for_good(rig, prompt):
    """One that fits is served."""
    await rig.send(prompt(max_tokens=60), "bulk", x_request_id="large")
    await rig.send(prompt(max_tokens=1), "bulk", x_request_id="small")
    await rig.serve_all(routes=ROUTES, tenant_quotas={"acme": {"concurrent_tokens": 50}})
    assert rig.error("large") == "rate_limited"
    assert rig.replies("large")[0].headers["x-retriable"] == b"0"
    assert "x-retry-after-ms" not in rig.replies("large")[0].headers
    assert rig.answer("small")


async def test_a_refused_reply_topic_is_not_made(rig, prompt):
    """The error goes where the tenant's errors go; the shared topic does not count."""
    own = rig.names.reply_for("mine")
    await rig.send(prompt(), "bulk", x_request_id="mine", x_reply_topic=own)
    await rig.send(prompt(), "bulk", x_request_id="shared", x_reply_topic=rig.names.replies)
    await rig.broker.create_topics(NewTopic("v4flash.replies-acme"))
    await rig.serve_all(routes=ROUTES, tenant_quotas={"*": {"reply_topics": 0}})
    assert rig.error("mine") == "rate_limited"
    assert rig.replies("mine")[0].headers["x-retriable"] == b"0"
    assert own not in await rig.broker.admin().partition_counts()
    assert rig.answer("shared")
