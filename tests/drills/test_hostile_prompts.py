"""Prompts that raise, hang, take all memory or kill, beside innocent ones."""

import pytest

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]

SHORT = "tell [[tokens=20]]"
STREAM = "tell [[tokens=60]] [[slow]]"


async def test_an_engine_that_fails_for_one_request(kafka, ledger, workers, passed):
    """Raising, out of memory, hanging: each is told its own error, and the others their answers."""
    worker = workers.start(kafka.bootstrap_servers, first_token_timeout_ms=3000)
    await ledger.send(12, STREAM)
    await ledger.until_streaming(12)
    ledger.fault()
    await ledger.send(4, "[[error]]", error="engine_error")
    await ledger.send(4, "[[memory]]", error="internal_error")
    await ledger.send(4, "[[stall]]", error="streaming_timeout")
    await ledger.send(24, SHORT)
    await ledger.until_settled()
    await ledger.until_committed()
    assert worker.runs
    assert await workers.end(worker) == 0
    passed("engine raising, out of memory, hanging for one request")


async def test_a_killer_among_sixteen_innocents(kafka, ledger, workers, passed):
    """Each worker dies of it until it is put aside; exactly the killer is, and all others are answered."""
    await ledger.send(9, SHORT)
    await ledger.send(1, "[[die]]", error="quarantined")
    await ledger.send(7, SHORT)
    worker, num_deaths = workers.start(kafka.bootstrap_servers), 0
    while not all(entry.answer.settled for entry in ledger.entries.values()):
        await ledger.read(0.2)
        if not worker.runs:
            assert worker.process.returncode == 137, worker.log.read_text()[-3000:]
            num_deaths += 1
            assert num_deaths <= 5
            ledger.fault()
            worker = workers.start(kafka.bootstrap_servers)
    await ledger.until_committed()
    await ledger.until_dead_letters(1, seconds=10.0)
    assert num_deaths == 5
    assert await workers.end(worker) == 0
    passed("a killer among 16 innocents (5 deaths)", max_duplicates=16)


async def test_five_kills_of_a_full_batch(kafka, ledger, workers, passed):
    """From outside: nothing is put aside."""
    await ledger.send(16, STREAM)
    for num_at_work in (16, 16, 1, 1, 1):  # what two workers had in work when they vanished runs alone
        worker = workers.start(kafka.bootstrap_servers)
        enough = num_at_work + sum(len(entry.attempts) for entry in ledger.entries.values())
        await ledger.until(
            lambda: sum(len(entry.attempts) for entry in ledger.entries.values()) >= enough,  # noqa: B023
            seconds=180,
            what="the attempts of this worker",
        )
        ledger.fault()
        await workers.kill(worker)
    last = workers.start(kafka.bootstrap_servers)
    await ledger.until_settled(seconds=400)
    await ledger.until_committed()
    assert await workers.end(last) == 0
    assert ledger.num_twice >= 16
    passed("five SIGKILLs of a full batch", max_duplicates=16)
