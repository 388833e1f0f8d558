"""From the settings of the SSD tier to copies that run: directories, sizes, a first measurement of the disk."""

import logging
import os
import time
from pathlib import Path

from engine.cache.compression import Compression
from engine.cache.cost import TransferCost
from engine.cache.disk import Disk, aligned_buffer
from engine.cache.disk_tier import DiskTier
from engine.cache.record import record_bytes
from engine.cache.segments import SegmentStore, smallest_capacity
from engine.cache.transfers import BlockMemory, Transfers
from engine.config import ColdConfig
from engine.errors import CacheStoreBusyError, CacheStoreError

_log = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 64 << 20
MIN_SEGMENTS = 8
NUM_PROBE_READS = 8


def open_transfers(config: ColdConfig, memory: BlockMemory, *, disk: Disk | None = None) -> Transfers:
    """Take the directories, index what an earlier process left and measure a read. Raises CacheStoreError.

    While another process has a directory the tier stays empty, and takes it over when that process ends."""
    disk = disk or Disk()
    size = record_bytes(memory.bytes_per_block)
    capacity = config.capacity_bytes // len(config.directories)
    if capacity < smallest_capacity(memory.bytes_per_block):
        raise CacheStoreError(f"swap_space gives each l3_cache_path {capacity} bytes, a block alone takes {size}")
    segment = max(size, min(MAX_SEGMENT_BYTES, capacity // MIN_SEGMENTS) // size * size)
    stores = [SegmentStore(directory, capacity, segment, disk) for directory in config.directories]
    tier = DiskTier(stores, admission=config.admission)
    try:
        tier.open()
    except CacheStoreBusyError as error:
        _log.warning("%s: the SSD tier waits for it", error)
    cost = TransferCost(num_readers=config.num_readers, has_gate=config.has_gate)
    try:
        cost.observe_read(max(read_seconds(disk, directory, size) for directory in config.directories))
    except OSError as error:
        tier.close()
        raise CacheStoreError(f"l3_cache_path cannot be measured: {error.strerror}") from None
    _log.info("SSD tier: %d blocks found, a block reads in %.2f ms", tier.num_blocks, cost.block_seconds * 1000)
    return Transfers(
        tier,
        memory,
        cost,
        compression=Compression() if config.compress else None,
        num_write_slots=config.num_write_slots,
        has_deadline=config.has_deadline,
    )


def read_seconds(disk: Disk, directory: Path, num_bytes: int) -> float:
    """Median time to read one record of a file that was just written. Raises OSError."""
    buffer = aligned_buffer(num_bytes)
    path = directory / f"probe-{os.getpid()}"
    disk.remove(path)
    fd = disk.open(path, create=True)
    try:
        for index in range(NUM_PROBE_READS):
            disk.write(fd, buffer, index * len(buffer))
        samples = []
        for index in range(NUM_PROBE_READS):
            began = time.perf_counter()
            disk.read(fd, buffer, index * len(buffer))
            samples.append(time.perf_counter() - began)
    finally:
        disk.close(fd)
        disk.remove(path)
    return sorted(samples)[len(samples) // 2]
