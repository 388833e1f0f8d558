"""The broker goes away, or a connection to it breaks, while streams are open."""

import asyncio

import pytest
from proxy import Action, ApiKey

pytestmark = [pytest.mark.drill, pytest.mark.timeout(180)]

STREAM = "tell [[tokens=60]] [[slow]]"
SHORT = "tell [[tokens=20]]"


@pytest.mark.parametrize("how", ["clean", "SIGKILL"])
async def test_broker_restart_during_streams(kafka, ledger, workers, passed, how):
    """The worker lives through it, and its streams go on."""
    worker = workers.start(kafka.bootstrap_servers)
    await ledger.send(24, STREAM)
    await ledger.until_streaming(16)
    ledger.fault()
    await asyncio.to_thread(kafka.kill if how == "SIGKILL" else kafka.stop)
    assert ledger.num_streaming >= 16
    await asyncio.to_thread(kafka.start)
    await ledger.until_settled()
    await ledger.send(12, SHORT)
    await ledger.until_settled()
    await ledger.until_committed()
    assert worker.runs, worker.log.read_text()[-2000:]
    assert await workers.end(worker) == 0
    passed(f"broker restart, {how}, during streams")


async def test_produce_connection_cut_after_the_request_was_sent(proxy, ledger, workers, passed):
    """The broker has the records and the worker hears nothing: the retry is no second copy for the reader."""
    worker = workers.start(f"127.0.0.1:{proxy.port}")
    await ledger.send(12, STREAM)
    await ledger.until_streaming(12)
    rule = proxy.rule(ApiKey.PRODUCE, Action.CUT, times=3)
    await asyncio.wait_for(rule.hit.wait(), 30)
    ledger.fault()
    await ledger.until_settled()
    await ledger.until_committed()
    assert worker.runs, worker.log.read_text()[-2000:]
    assert await workers.end(worker) == 0
    passed("produce connection cut after the request")
