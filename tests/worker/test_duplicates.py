import json

from engine.scripted import ScriptedEngine
from topics.routes import Route, RouteTable
from worker.broker.api import NewTopic


async def test_a_duplicate_of_a_running_request_is_settled_with_it(rig, prompt):
    """The same id, body and route twice at once: one run, one terminal record, both committed."""
    engine = ScriptedEngine(tokens_per_second=2000)
    for _ in range(3):
        await rig.send(prompt("[[tokens=40]]", stream=True), x_request_id="r")
    await rig.serve_all(engine)
    assert engine.stats().generated_tokens_total == 40
    assert len(rig.answer("r")) == 40
    assert sum("x-final" in reply.headers for reply in rig.replies("r")) == 1
    assert await rig.uncommitted() == {}


async def test_a_duplicate_with_a_route_of_its_own_gets_the_same_answer_there(rig, prompt):
    """One run; another topic, mode and correlation id get an attempt of their own."""
    engine = ScriptedEngine(tokens_per_second=2000)
    await rig.broker.create_topics(NewTopic("v4flash.replies.mine", 1))
    await rig.send(prompt("[[tokens=40]]", stream=True), x_request_id="r")
    await rig.send(prompt("[[tokens=40]]", stream=True), x_request_id="r", x_reply_topic="v4flash.replies.mine")
    await rig.send(prompt("[[tokens=40]]", stream=True), x_request_id="r", x_reply_mode="final", x_correlation_id="c")
    await rig.serve_all(engine)
    assert engine.stats().generated_tokens_total == 40
    assert rig.answer("r", "v4flash.replies.mine") == rig.answer("r")
    (whole,) = [reply for reply in rig.replies("r") if reply.headers.get("x-correlation-id") == b"c"]
    assert whole.body["choices"][0]["message"]["content"] == rig.answer("r")
    assert await rig.uncommitted() == {}


async def test_a_duplicate_is_not_held_up_by_the_reply_topic_of_the_one_it_follows(rig, prompt):
    """That one cannot send and takes no more of the run: the duplicate runs by itself, and nothing else is changed."""
    slow = "v4flash.replies.slow"
    await rig.broker.create_topics(NewTopic(slow, 1))
    rig.broker.stall("send", topic=slow)
    body = prompt("[[tokens=40]]", stream=True)
    await rig.send(body, x_request_id="r", x_reply_topic=slow)
    await rig.send(body, x_request_id="r")
    engine = ScriptedEngine(tokens_per_second=2000)
    await rig.serve_all(engine, streaming_timeout_ms=300, reply_give_up_seconds=1.0)
    assert len(rig.answer("r")) == 40
    assert 40 <= engine.stats().generated_tokens_total <= 80
    assert len(rig.dead_letters()) == 1
    assert await rig.uncommitted() == {}


async def test_a_duplicate_of_another_tenant_runs_by_itself(rig, prompt):
    """The same id and body, and nothing shared."""
    engine = ScriptedEngine(tokens_per_second=2000)
    await rig.send(prompt("[[tokens=40]]"), x_request_id="r", x_tenant="one")
    await rig.send(prompt("[[tokens=40]]"), x_request_id="r", x_tenant="two")
    trusting = Route(topics=rig.names.all_prompts, trust_tenant=True)
    await rig.serve_all(engine, routes=RouteTable(routes=(trusting,)))
    assert engine.stats().generated_tokens_total == 80


async def test_a_duplicate_outlives_a_run_that_ends_by_its_own_deadline(rig, prompt):
    """The first one is told that it is late; the other one, on its own route, still gets the answer."""
    await rig.broker.create_topics(NewTopic("v4flash.replies.mine", 1))
    body = prompt("[[tokens=30]]")
    await rig.send(body, x_request_id="r", x_ttl_ms="60")
    await rig.send(body, x_request_id="r", x_reply_topic="v4flash.replies.mine")
    await rig.serve_all(ScriptedEngine(tokens_per_second=200))
    assert rig.error("r") == "deadline_exceeded"
    assert len(rig.answer("r", "v4flash.replies.mine")) == 30


async def test_two_tenants_may_use_one_id_for_different_prompts(rig, prompt):
    """Ids are a tenant's own: no conflict, and neither gets the other's answer."""
    await rig.broker.create_topics(NewTopic("prompts.acme", 1), NewTopic("prompts.umbra", 1))
    routes = RouteTable(routes=(Route(pattern=r"prompts\.(?P<tenant>[a-z]+)", output_topic=rig.names.replies),))
    for tenant, num_tokens in (("acme", 3), ("umbra", 5)):
        body = json.dumps(prompt(f"[[tokens={num_tokens}]]")).encode()
        await rig.producer.send(f"prompts.{tenant}", body, headers=(("x-request-id", b"1"),))
    await rig.serve_all(routes=routes)
    told = [reply.body["usage"]["completion_tokens"] for reply in rig.replies("1")]
    assert sorted(told) == [3, 5]
