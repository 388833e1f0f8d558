"""SIGKILL, SIGTERM and SIGSTOP of a worker at every point where it matters."""

import asyncio
import signal

import pytest
from proxy import Action, ApiKey

pytestmark = [pytest.mark.drill, pytest.mark.timeout(420)]

STREAM = "tell [[tokens=60]] [[slow]]"
SHORT = "tell [[tokens=20]]"


async def test_kill_before_the_first_chunk(kafka, ledger, workers, passed):
    """The prompts were taken and nothing was said: another worker says it."""
    first = workers.start(kafka.bootstrap_servers, scripted_tokens_per_second=0.2)
    await ledger.send(1, SHORT)
    await asyncio.sleep(6.0)  # it starts, takes the prompt, and speaks after five seconds at the earliest
    ledger.fault()
    await workers.kill(first)
    assert ledger.num_streaming == 0
    second = workers.start(kafka.bootstrap_servers)
    await ledger.send(12, SHORT)
    await ledger.until_settled()
    await ledger.until_committed()
    assert await workers.end(second) == 0
    assert ledger.num_open_at_fault == 1
    passed("SIGKILL before the first chunk")


async def test_kill_in_mid_stream(kafka, ledger, workers, passed):
    """Streams are open at the kill; each is answered in a second attempt."""
    first = workers.start(kafka.bootstrap_servers)
    await ledger.send(24, STREAM)
    await ledger.until_streaming(16)
    ledger.fault()
    await workers.kill(first)
    second = workers.start(kafka.bootstrap_servers)
    await ledger.until_settled()
    await ledger.until_committed()
    assert await workers.end(second) == 0
    assert ledger.num_twice >= 16
    passed("SIGKILL in mid-stream")


async def test_kill_in_mid_stream_of_a_real_model(kafka, model_ledger, workers, passed):
    """The same on SmolLM2: each has a complete answer in the end."""
    ledger, flags = model_ledger, {"engine": "model", "streaming_timeout_ms": 60_000}
    first = workers.start(kafka.bootstrap_servers, **flags)
    await workers.until_serving(first)
    await ledger.send(20, "Tell me a long story about the sea,")
    await ledger.until_streaming(16, seconds=180)
    ledger.fault()
    await workers.kill(first)
    second = workers.start(kafka.bootstrap_servers, **flags)
    await ledger.until_settled(seconds=240)
    await ledger.until_committed()
    assert await workers.end(second) == 0
    assert ledger.num_twice >= 16
    passed("SIGKILL in mid-stream, SmolLM2", ledger=ledger)


async def test_kill_between_the_terminal_record_and_its_acknowledgement(kafka, proxy, ledger, workers, passed):
    """The broker has the record, the worker does not know: it is answered again, and the reader takes one."""
    first = workers.start(f"127.0.0.1:{proxy.port}")
    rule = proxy.rule(ApiKey.PRODUCE, Action.WITHHOLD, containing=b"x-final")
    await ledger.send(1, SHORT)
    await asyncio.wait_for(rule.hit.wait(), 90)
    ledger.fault()
    await workers.kill(first)
    assert set((await ledger.committed()).values()) <= {0}  # a lease at most: nothing is committed past the prompt
    second = workers.start(kafka.bootstrap_servers)
    await ledger.until_settled()
    await ledger.until_committed()
    await ledger.read(1.0)
    assert await workers.end(second) == 0
    assert ledger.num_twice == 1, "no second attempt: the fault was not there"
    passed("SIGKILL after the terminal record, before its ack", max_duplicates=1)


async def test_kill_between_the_acknowledgement_and_the_commit(kafka, proxy, ledger, workers, passed):
    """Answered and known, and the commit's answer withheld: whatever the broker has kept, nothing is lost."""
    first = workers.start(f"127.0.0.1:{proxy.port}")
    rule = proxy.rule(ApiKey.OFFSET_COMMIT, Action.WITHHOLD)
    await ledger.send(12, SHORT)
    await ledger.until_settled()
    await asyncio.wait_for(rule.hit.wait(), 90)
    ledger.fault()
    await workers.kill(first)
    second = workers.start(kafka.bootstrap_servers)
    await ledger.send(12, SHORT)
    await ledger.until_settled()
    await ledger.until_committed()
    assert await workers.end(second) == 0
    assert rule.num_hits == 1
    passed("SIGKILL after the ack, at the commit", max_duplicates=12)


@pytest.mark.parametrize(("grace", "num_twice"), [(20, 0), (1, 12)])
async def test_sigterm_with_work_shorter_and_longer_than_the_grace(kafka, ledger, workers, passed, grace, num_twice):
    """Shorter: it finishes and commits, and nobody says it again. Longer: the next worker does."""
    first = workers.start(kafka.bootstrap_servers, grace_seconds=grace)
    await ledger.send(12, STREAM)
    await ledger.until_streaming(12)
    ledger.fault()
    ending = asyncio.ensure_future(workers.end(first))
    second = workers.start(kafka.bootstrap_servers)
    await workers.until_serving(second)
    await ledger.until_settled()
    assert await ending == 0
    await ledger.until_committed()
    assert await workers.end(second) == 0
    assert ledger.num_twice == num_twice
    passed(f"SIGTERM, work {'longer' if num_twice else 'shorter'} than the grace")


async def test_a_zombie_commits_nothing(kafka, ledger, workers, passed):
    """Stopped for 40 s in mid-stream, its partitions go to another; awake again it takes nothing back."""
    zombie = workers.start(kafka.bootstrap_servers)
    await ledger.send(12, STREAM)
    await ledger.until_streaming(12)
    ledger.fault()
    zombie.signal_all(signal.SIGSTOP)
    second = workers.start(kafka.bootstrap_servers)
    stopped = asyncio.get_running_loop().time()
    await ledger.until_settled()
    await ledger.until_committed()
    while asyncio.get_running_loop().time() < stopped + 40:
        await ledger.read(1.0)
    zombie.signal_all(signal.SIGCONT)
    await ledger.send(24, SHORT)
    await ledger.until_settled()
    await ledger.until_committed()
    assert [await workers.end(worker) for worker in (zombie, second)] == [0, 0]
    assert ledger.num_twice >= 12
    passed("SIGSTOP 40 s, SIGCONT (zombie)", max_duplicates=12)
