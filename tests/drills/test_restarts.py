"""SIGUSR2: another process takes over while streams are open."""

import signal

import pytest

pytestmark = [pytest.mark.drill, pytest.mark.timeout(420)]

STREAM = "tell [[tokens=200]] [[slow]]"


async def test_a_restart_under_twenty_streams(kafka, ledger, workers, passed):
    """Each stream goes on in the process that began it, and later prompts are the next one's."""
    worker = workers.start(kafka.bootstrap_servers)
    await workers.until_serving(worker)
    (first,) = worker.tree()[:-1]
    await ledger.send(20, STREAM)
    await ledger.until_streaming(20)
    ledger.fault()
    worker.signal(signal.SIGUSR2)
    while not (await ledger.read(0.2), len(worker.tree()) == 3)[1]:
        assert worker.runs, worker.log.read_text()[-3000:]
    second = worker.tree()[0]
    while first.is_running():
        await ledger.send(2, "tell [[tokens=20]]")
        await ledger.read(0.5)
    assert second.is_running()
    await ledger.until_settled()
    await ledger.until_committed()
    assert ledger.num_twice == 0
    silence = max(entry.longest_silence for entry in ledger.entries.values())
    assert await workers.end(worker) == 0
    passed(f"SIGUSR2 under 20 streams (longest silence {silence:.1f} s)")
