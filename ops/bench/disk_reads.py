"""Block-size reads through the SSD tier beside a direct loop on the same file, both at one queue depth."""

import hashlib
import os
import queue
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from percentiles import percentile

BLOCK_BYTES = 368_640  # of SmolLM2-135M in bf16, 16 tokens
NUM_BLOCKS, NUM_READS, DEPTH, ROUNDS = 512, 1500, 4, 5


class Memory:
    bytes_per_block = BLOCK_BYTES

    def __init__(self) -> None:
        self.data = memoryview(bytearray(DEPTH * BLOCK_BYTES))

    def block_bytes(self, block_id: int) -> memoryview:
        return self.data[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES]


def compare(directory: Path) -> dict[str, Any]:
    """Seconds of each read, in turn: direct; the tier alone, which looks up, checks and copies; ours, which is that
    through the queue and the threads of the copies, until the block lies in the KV memory."""
    from engine.cache.cost import TransferCost
    from engine.cache.disk import Disk, aligned_buffer
    from engine.cache.disk_tier import DiskTier
    from engine.cache.record import copy_block, record_bytes
    from engine.cache.segments import SegmentStore
    from engine.cache.transfers import Transfers

    path, size, disk = directory / "reads", record_bytes(BLOCK_BYTES), Disk()
    store = SegmentStore(path, 2 * NUM_BLOCKS * size, NUM_BLOCKS * size, disk)
    tier, memory = DiskTier([store]), Memory()
    tier.open()
    transfers = Transfers(tier, memory, TransferCost(num_readers=DEPTH), has_deadline=False)
    names = [hashlib.sha256(bytes([number % 256, number // 256])).digest() for number in range(NUM_BLOCKS)]
    for name in names:
        memory.block_bytes(0)[:] = os.urandom(BLOCK_BYTES)
        tier.wants(name, at_once=True)
        while not transfers.write(name, 0, 0):
            time.sleep(0.001)
            tier.wants(name, at_once=True)
    while transfers.num_unwritten:
        time.sleep(0.001)
    if not disk.direct[path]:
        print("not measured: this filesystem has no O_DIRECT")
        return {}
    (file,) = path.glob("*.seg")
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    buffers = [aligned_buffer(size) for _ in range(DEPTH)]
    rng = random.Random(1)

    def direct(worker: int, number: int) -> float:
        os.preadv(fd, [buffers[worker]], number * size)
        return time.perf_counter()

    def tier_alone(worker: int, number: int) -> float:
        found = tier.read(names[number], buffers[worker])
        assert found is not None
        copy_block(memory.block_bytes(worker), found[1])
        return time.perf_counter()

    def ours(worker: int, number: int) -> float:
        with poll_lock:
            load = transfers.start([names[number]], [worker])
            pending[id(load)] = worker
        landings[worker].acquire()
        assert load.landed == [True]
        return landed_at[worker]

    pending: dict[int, int] = {}
    landings = [threading.Semaphore(0) for _ in range(DEPTH)]
    landed_at = [0.0] * DEPTH
    poll_lock = threading.Lock()

    def landed() -> None:
        now = time.perf_counter()
        with poll_lock:
            for load in transfers.poll():
                worker = pending.pop(id(load))
                landed_at[worker] = now
                landings[worker].release()

    transfers.on_landed = landed
    kinds = {"direct": direct, "tier": tier_alone, "ours": ours}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, read in kinds.items():
            order = [rng.randrange(NUM_BLOCKS) for _ in range(NUM_READS)]
            seconds[name] += timed(read, order)
    os.close(fd)
    transfers.close()
    shutil.rmtree(path)
    report = {name: {"p50": percentile(s, 50), "p99": percentile(s, 99)} for name, s in seconds.items()}
    ratios = {n: {key: report[n][key] / report["direct"][key] for key in ("p50", "p99")} for n in ("tier", "ours")}
    print(f"\nreads of {BLOCK_BYTES} bytes, O_DIRECT, {DEPTH} at a time, {ROUNDS} rounds of {NUM_READS} in turn")
    print("| | p50 ms | p99 ms | p50 ratio (goal 1.3) | p99 ratio (goal 2) |\n|---|---|---|---|---|")
    for name, values in report.items():
        ratio = " | ".join(f"{ratios[name][key]:.2f}" for key in ("p50", "p99")) if name in ratios else "1 | 1"
        print(f"| {name} | {values['p50'] * 1e3:.2f} | {values['p99'] * 1e3:.2f} | {ratio} |", flush=True)
    return {**report, "ratios": ratios}


def timed(read: Callable[[int, int], float], order: list[int]) -> list[float]:
    """Each read's seconds, `DEPTH` threads taking from one list."""
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in order:
        todo.put(number)
    seconds: list[float] = []

    def work(worker: int) -> None:
        while True:
            try:
                number = todo.get_nowait()
            except queue.Empty:
                return
            began = time.perf_counter()
            seconds.append(read(worker, number) - began)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(DEPTH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds
