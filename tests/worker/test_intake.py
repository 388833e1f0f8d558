"""How intake follows the engine."""

from engine.scripted import ScriptedEngine


async def test_prompts_beyond_the_cache_are_left_in_their_topic_and_answered_later(rig, prompt):
    """A small cache: bulk pauses while it is full, and every prompt is answered in the end."""
    ids = [f"r{i}" for i in range(40)]
    for i, request_id in enumerate(ids):
        await rig.send(prompt(f"[[tokens=32]] {i}"), ("urgent", "standard", "bulk")[i % 3], x_request_id=request_id)
    await rig.serve_all(ScriptedEngine(num_blocks=16), backpressure_dwell_seconds=0.01)
    assert all(rig.answer(request_id) for request_id in ids)
    assert await rig.uncommitted() == {}


async def test_one_stuck_prompt_stops_its_partition_and_no_other(rig, prompt):
    """The window of a partition is full; urgent prompts go on being answered."""
    async with rig.running(rig.app(max_inflight_per_partition=1, grace_seconds=0.05)):
        for i in range(4):
            await rig.send(prompt("[[stall]]"), "bulk", x_request_id=f"stuck{i}")
        for i in range(6):
            await rig.send(prompt(), "urgent", x_request_id=f"u{i}")
        for i in range(6):
            await rig.until_replied(f"u{i}")
    assert sum((await rig.uncommitted()).values()) == 4
