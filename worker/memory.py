"""How much memory a process takes, and how much more one may take on this machine or in this container."""

from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def resident_bytes(pid: int) -> int:
    """0 for a process that has ended."""
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def available_bytes(cgroup: Path = CGROUP) -> int:
    """What may still be taken without swapping or an end by the kernel: the host's, or the container's where it is
    less. What the container holds in page cache counts as taken: the answer is on the safe side."""
    available = int(psutil.virtual_memory().available)
    for limit, usage in LIMITS:  # version 2, version 1
        with suppress(OSError, ValueError):  # not there, or "max"
            available = min(available, int((cgroup / limit).read_text()) - int((cgroup / usage).read_text()))
    return available
