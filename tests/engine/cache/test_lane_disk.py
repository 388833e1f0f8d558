"""Long sequences on a disk that is full, damaged, or hangs: they alone end, and nobody waits for it."""

import errno
import threading
import time
from typing import Any

import pytest

from engine.api import FinishReason
from engine.cache.cold_admission import ColdAdmission
from engine.cache.readers import HUNG_SECONDS
from engine.errors import CacheCapacityError


def test_the_largest_that_is_taken_fits_whatever_others_write(cores: Any, long: Any) -> None:
    """Only the blocks that leave the memory are pinned, so there is room left on the SSD for others and for it."""
    core = cores.open(max_model_len=1_000, admission=ColdAdmission.FIRST)
    request = long("a", 4 * core.scheduler.lane.max_blocks - 30, 30)
    with pytest.raises(CacheCapacityError):
        core.add(long("b", 4 * core.scheduler.lane.max_blocks - 30, 31))
    core.add(request)
    until, num_short, most = time.monotonic() + 20, 0, 0
    while request.finish_reason is None and time.monotonic() < until:
        if len(core._requests) < 3:
            num_short += 1
            core.add(cores.request(f"s{num_short}", cores.text(num_short, 30), 1))
        assert not core.step().errors
        most = max(most, len(core.cache.cold.transfers.tier.index.pinned))
    assert request.output_token_ids == cores.expected(request)
    assert most == core.cache.cold_prefix.max_blocks and num_short > 10
    core.close()


def test_a_damaged_block_is_computed_again(core: Any, cores: Any, long: Any) -> None:
    """The answer is right, and the disk is not asked for that block any more."""
    request = long("a")
    core.add(request)
    while request.num_cold_blocks < 10:
        core.step()
    cores.disk.on_read = lambda data: data.__setitem__(len(data) - 4095, data[len(data) - 4095] ^ 1)
    tier, until = core.cache.cold.transfers.tier, time.monotonic() + 20
    while not tier.counters.corrupt and time.monotonic() < until:  # a step may find nothing to do before it reads
        assert not core.step().errors
    cores.disk.on_read = lambda data: None
    assert not cores.run(core)
    assert request.output_token_ids == cores.expected(request) and request.num_preemptions == 1


def test_a_disk_that_reads_nothing_back_ends_it_with_an_error_and_nobody_else(core: Any, cores: Any, long: Any) -> None:
    """After it was computed again twice."""

    def fail(data: memoryview) -> None:
        raise OSError(errno.EIO, "Input/output error")

    cores.disk.on_read = fail
    request, short = long("a"), cores.request("short", cores.text("s", 9), 4)
    errors = cores.run(core, request, short)
    assert list(errors) == ["a"] and "could not be read back" in errors["a"]
    assert request.finish_reason is FinishReason.ERROR and short.output_token_ids == cores.expected(short)


def test_a_disk_that_takes_nothing_ends_it_with_an_error_and_nobody_else(core: Any, cores: Any, long: Any) -> None:
    """After one visit to the disk: a directory that has failed takes nothing for a minute, and nobody waits for it."""
    num_visits = [0]

    def fail(data: memoryview) -> None:
        num_visits[0] += 1
        raise OSError(errno.EIO, "Input/output error")

    cores.disk.on_write = fail
    request, short = long("a"), cores.request("short", cores.text("s", 9), 4)
    errors = cores.run(core, request, short)
    assert list(errors) == ["a"] and "does not take its blocks" in errors["a"] and num_visits == [1]
    assert short.output_token_ids == cores.expected(short) and core.cache.pool.num_used == 0


def test_a_disk_that_hangs_ends_it_with_an_error_and_nobody_else(cores: Any, long: Any) -> None:
    """At once: nobody waits for such a disk, and it is not asked for the same again."""
    now = [100.0]
    core = cores.open(max_model_len=1_000, clock=lambda: now[0])
    request, short = long("a"), cores.request("short", cores.text("s", 9), 4)
    core.add(request)
    while request.num_cold_blocks < 5:
        core.step()
    opened = threading.Event()

    def hang(data: memoryview) -> None:
        now[0] += HUNG_SECONDS + 1
        opened.wait(10)

    cores.disk.on_read = hang
    errors = cores.run(core, short)
    opened.set()
    assert errors == {"a": "the SSD does not answer"} and request.finish_reason is FinishReason.ERROR
    assert short.output_token_ids == cores.expected(short) and request.num_preemptions == 0
    core.close()


def test_a_disk_that_hangs_in_a_write_ends_it_with_an_error_and_nobody_else(cores: Any, long: Any) -> None:
    """It waits for its blocks to be written no longer than a read is waited for."""
    now = [100.0]
    core = cores.open(max_model_len=1_000, clock=lambda: now[0])
    opened, began = threading.Event(), threading.Event()

    def hang(data: memoryview) -> None:
        began.set()
        opened.wait(10)

    cores.disk.on_write = hang
    request, short = long("a"), cores.request("short", cores.text("s", 9), 4)
    core.add(request)
    while not began.is_set():
        assert not core.step().errors
    for _ in range(20):
        assert not core.step().errors
    now[0] += HUNG_SECONDS + 1
    errors = cores.run(core, short)
    opened.set()
    assert list(errors) == ["a"] and "the SSD does not answer" in errors["a"]
    assert short.output_token_ids == cores.expected(short) and core.cache.pool.num_used == 0
    core.close()


def test_its_blocks_are_not_dropped_from_a_full_ssd(core: Any, cores: Any, long: Any) -> None:
    """Others write through meanwhile, much more than fits, and give way to each other instead."""
    request = long("a", 100, 40)
    core.add(request)
    number = 0
    until = time.monotonic() + 20
    while request.finish_reason is None and time.monotonic() < until:
        if len(core._requests) < 3:
            number += 1
            prompt = cores.text(number // 2, 30)
            core.add(cores.request(f"s{number}", prompt, 1))
        core.step()
    assert request.output_token_ids == cores.expected(request) and request.num_preemptions == 0
