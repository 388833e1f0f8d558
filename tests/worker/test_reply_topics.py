"""Which topics a prompt may have its answer written to, with the worker's credentials."""

import json

from topics.routes import Route, RouteTable
from worker.broker.api import NewTopic

ROUTES = RouteTable(
    routes=(Route(pattern="jobs-(?P<tenant>[a-z]+)", reply_prefixes=("v4flash.replies.{tenant}", "jobs-acme")),)
)


async def test_a_tenant_cannot_have_its_answer_written_into_anothers_topic_or_among_prompts(rig, prompt):
    """The errors go to the shared topic; the tenant's own topics serve."""
    topics = ("v4flash.replies.acme", "v4flash.replies.other", "jobs-acme", "jobs-other")
    await rig.broker.create_topics(*(NewTopic(name, 1) for name in topics))
    for name, topic in {
        "own": topics[0],
        "theirs": topics[1],
        "loop": "jobs-acme",
        "shared": rig.names.replies,
    }.items():
        await rig.producer.send(
            "jobs-acme",
            json.dumps(prompt()).encode(),
            headers=(("x-request-id", name.encode()), ("x-reply-topic", topic.encode())),
        )
    await rig.serve_all(routes=ROUTES)
    assert rig.answer("own", "v4flash.replies.acme")
    for name in ("theirs", "loop", "shared"):
        assert rig.error(name) == "invalid_reply_topic"
    assert rig.broker.records("v4flash.replies.other") == []
    assert len(rig.broker.records("jobs-acme")) == 4


async def test_a_topic_that_a_pattern_takes_for_prompts_is_no_reply_topic(rig, prompt):
    """Also where the allow-list of the settings has it: the worker would answer its own answer, for ever."""
    await rig.broker.create_topics(NewTopic("jobs-acme", 1))
    routes = RouteTable(routes=(Route(pattern="jobs-[a-z]+"),))
    body = json.dumps(prompt()).encode()
    await rig.producer.send("jobs-acme", body, headers=(("x-request-id", b"loop"), ("x-reply-topic", b"jobs-acme")))
    await rig.serve_all(routes=routes, reply_prefixes=("jobs-",))
    assert rig.error("loop") == "invalid_reply_topic"
    assert len(rig.broker.records("jobs-acme")) == 1
