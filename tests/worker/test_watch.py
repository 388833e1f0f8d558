import asyncio

import pytest

from engine.api import Delta
from worker.clock import SystemClock
from worker.deadline import Deadline
from worker.ended import DeadlineExceeded, RequestCancelled, StreamStalled
from worker.watch import DeltaWatch


async def deltas_then_silence(num_deltas: int):
    for _ in range(num_deltas):
        yield Delta(0, "a", (1,))
    await asyncio.Event().wait()


def watch_of(*, first: float = 60.0, between: float = 60.0, deadline: Deadline | None = None) -> DeltaWatch:
    return DeltaWatch(SystemClock(), deadline=deadline, first_token_seconds=first, between_tokens_seconds=between)


async def test_the_limit_between_tokens_counts_although_the_first_one_was_longer():
    """The timer of the first wait is a minute, that of the later ones short."""
    watch, deltas = watch_of(between=0.02), deltas_then_silence(3)
    async with asyncio.timeout(5):
        for _ in range(3):
            assert await watch.next(deltas) is not None
        with pytest.raises(StreamStalled):
            await watch.next(deltas)
    watch.close()


async def test_another_run_has_the_limit_of_the_first_token_again():
    """Its prefill is no silence between tokens."""
    watch = watch_of(between=0.02)
    async with asyncio.timeout(5):
        assert await watch.next(deltas_then_silence(1)) is not None
        watch.begin_again()

        async def late():
            await asyncio.sleep(0.05)
            yield Delta(0, "a", (1,))

        assert await watch.next(late()) is not None
    watch.close()


async def test_a_timer_that_fires_too_early_is_set_again():
    """Tokens that come in time move the limit; only silence ends the wait."""
    watch, release = watch_of(between=0.05), asyncio.Event()

    async def steady():
        for _ in range(6):
            yield Delta(0, "a", (1,))
            await asyncio.sleep(0.02)
        await release.wait()

    deltas = steady()
    async with asyncio.timeout(5):
        for _ in range(6):
            assert await watch.next(deltas) is not None
        with pytest.raises(StreamStalled):
            await watch.next(deltas)
    watch.close()


async def test_a_deadline_and_a_cancel_end_the_wait():
    """Each by its own name."""
    late = watch_of(deadline=Deadline(SystemClock().wall_ms() + 20, "x-ttl-ms"))
    with pytest.raises(DeadlineExceeded) as told:
        await late.next(deltas_then_silence(0))
    assert told.value.param == "x-ttl-ms"
    watch = watch_of()
    asyncio.get_running_loop().call_soon(watch.cancel)
    with pytest.raises(RequestCancelled):
        await watch.next(deltas_then_silence(0))
    watch.close()


@pytest.mark.parametrize("num_turns", [0, 1, 2])
async def test_a_second_cancel_is_harmless_at_any_time(num_turns: int):
    """Also while the first one is ending the wait: it comes from the reader of all cancels, which must not fall."""
    watch = watch_of()
    waiting = asyncio.create_task(watch.next(deltas_then_silence(0)))
    await asyncio.sleep(0)
    watch.cancel()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    watch.cancel()
    with pytest.raises(RequestCancelled):
        await waiting
    watch.close()
