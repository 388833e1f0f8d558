"""Blocks on their way from the SSD into the KV memory, and the read of one of them."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.cache.block import BlockHash


@dataclass(slots=True, eq=False)
class Load:
    """`landed` says which of the blocks came whole."""

    hashes: Sequence[BlockHash]
    block_ids: Sequence[int]
    deadline: float
    landed: list[bool] = field(default_factory=list)
    num_open: int = 0
    abandoned: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_landed(self) -> int:
        """Leading blocks that came: what follows a gap is of no use."""
        return self.landed.index(False) if False in self.landed else len(self.landed)


class Taker(Protocol):
    """Who brings what was read to its place."""

    on_landed: Callable[[], None]

    def take(self, read: "LoadRead", buffer: memoryview, since: float) -> bool:
        """In a reader's thread: whether the block has come whole into the place where its load wants it."""


@dataclass(slots=True, eq=False)
class LoadRead:
    """One block of a load, or without a load a read for its time alone."""

    taker: Taker
    block_hash: BlockHash
    load: Load | None
    index: int
    has_come: bool = False

    @property
    def is_unwanted(self) -> bool:
        return self.load is not None and self.load.abandoned

    def run(self, buffer: memoryview, since: float) -> None:
        self.has_come = self.taker.take(self, buffer, since)

    def ended(self) -> None:
        load = self.load
        if load is not None:
            with load.lock:
                load.landed[self.index] = self.has_come
                load.num_open -= 1
            if not load.num_open:
                self.taker.on_landed()
