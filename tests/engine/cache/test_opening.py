"""What stands between the settings of the SSD tier and copies that run."""

from pathlib import Path

import pytest

from engine.cache.cost import GateDecision
from engine.cache.opening import open_transfers
from engine.cache.transfers import Transfers
from engine.config import ColdConfig
from engine.errors import CacheStoreError
from worker.tier_metrics import GATE_DECISIONS


class Memory:
    bytes_per_block = 100_000

    def block_bytes(self, block_id: int) -> memoryview:
        return memoryview(bytearray(self.bytes_per_block))


def opened(*directories: Path, capacity: int = 32 << 20) -> Transfers:
    return open_transfers(ColdConfig(directories, capacity), Memory())


def test_the_disk_is_measured_before_the_first_load(tmp_path: Path) -> None:
    """One read has been timed, nothing is left of the probe, and each directory has its share of the space."""
    transfers = opened(tmp_path / "a", tmp_path / "b")
    assert transfers.cost.block_seconds > 0
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["lock", "lock"]
    assert [store.capacity_bytes for store in transfers.tier.stores] == [16 << 20, 16 << 20]
    transfers.close()


def test_a_space_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    """The error names the setting, what it gives and what a block takes."""
    with pytest.raises(CacheStoreError, match=r"swap_space gives each l3_cache_path 100000 bytes, a block alone"):
        opened(tmp_path, capacity=100_000)


def test_a_directory_in_use_is_waited_for(tmp_path: Path) -> None:
    """A worker that replaces another one starts beside it; the directory is taken over when that ends."""
    first = opened(tmp_path)
    second = opened(tmp_path)
    assert first.tier.is_open and not second.tier.is_open
    first.close()
    second.close()


def test_the_metrics_know_every_decision_of_the_gate() -> None:
    """All of them are there at zero from the start."""
    assert set(GATE_DECISIONS) == {str(decision) for decision in GateDecision}
