"""SIGUSR2: another process takes over while streams are open."""

import asyncio
import signal
import subprocess

import pytest

pytestmark = [pytest.mark.drill, pytest.mark.timeout(600)]

STREAM = "tell [[tokens=200]] [[slow]]"
SHORT = "tell [[tokens=20]]"


async def restart_under_streams(ledger, workers, worker, text: str, later: str) -> str:
    """Twenty streams, SIGUSR2, and prompts until the old process has ended; the longest silence of any reader."""
    await workers.until_serving(worker)
    (first,) = worker.tree()[:-1]
    await ledger.send(20, text)
    await ledger.until_streaming(20, seconds=180)
    ledger.fault()
    worker.signal(signal.SIGUSR2)
    while len(worker.tree()) < 3:
        await ledger.read(0.2)
        assert worker.runs, worker.log.read_text()[-3000:]
    second = worker.tree()[0]
    while first.is_running():
        if len(ledger.entries) - ledger.num_settled < 40:  # no more than a slow machine can answer
            await ledger.send(2, later)
        await ledger.read(0.5)
    assert second.is_running()
    await ledger.until_settled(seconds=240)
    await ledger.until_committed()
    assert ledger.num_open_at_fault == 20
    assert ledger.num_twice == 0
    assert await workers.end(worker) == 0
    return f"{max(entry.longest_silence for entry in ledger.entries.values()):.1f} s"


async def test_a_restart_under_twenty_streams(kafka, ledger, workers, passed):
    """Each stream goes on in the process that began it, and later prompts are the next one's."""
    worker = workers.start(kafka.bootstrap_servers)
    silence = await restart_under_streams(ledger, workers, worker, STREAM, SHORT)
    passed(f"SIGUSR2 under 20 streams (longest silence {silence})")


async def test_a_restart_under_twenty_streams_of_a_real_model(kafka, model_ledger, workers, passed):
    """The same on SmolLM2, which loads beside the streams."""
    worker = workers.start(kafka.bootstrap_servers, engine="model", streaming_timeout_ms=60_000)
    text = "Tell me a long story about the sea,"
    silence = await restart_under_streams(model_ledger, workers, worker, text, "Say hello,")
    passed(f"SIGUSR2 under 20 streams, SmolLM2 (silence {silence})", ledger=model_ledger)


NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


async def test_a_worker_that_is_process_1(kafka, ledger, workers, passed):
    """As in a container: it hears SIGUSR2 and SIGTERM, which the system keeps from a process 1 that does not listen."""
    if await asyncio.to_thread(subprocess.call, [*NAMESPACE, "true"], stderr=subprocess.DEVNULL):
        pytest.skip("needs the right to make a namespace of processes")
    worker = workers.start(kafka.bootstrap_servers, within=NAMESPACE)
    await workers.until_serving(worker)
    serving, first, _ = worker.tree()
    await ledger.send(12, "tell [[tokens=100]] [[slow]]")
    await ledger.until_streaming(12)
    ledger.fault()
    first.send_signal(signal.SIGUSR2)
    while serving.is_running():
        await ledger.send(1, SHORT)
        await ledger.read(0.5)
    await ledger.until_settled()
    await ledger.until_committed()
    assert ledger.num_twice == 0
    first.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.process.wait, 60) == 0
    passed("SIGUSR2, then SIGTERM, to a worker that is process 1")
