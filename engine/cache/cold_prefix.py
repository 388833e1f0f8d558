"""The leading blocks of a sequence that is larger than the KV memory: on the SSD alone, and pinned there."""

from collections import Counter
from dataclasses import dataclass, field

from engine.cache.block import BlockHash
from engine.cache.pool import BlockPool
from engine.cache.transfers import Transfers
from engine.request import Request

MAX_WRITES = 3
"""How often one block is handed over before it counts as refused. A directory whose disk has failed takes nothing for a
minute, so there the first failure decides; further tries are for a tier that was full."""


@dataclass(slots=True)
class ColdPrefix:
    """Of one sequence at a time. Its blocks are written as soon as they are full, and leave the pool, oldest first,
    when their room is wanted and they have been written. Never more than `max_blocks` of them are pinned."""

    pool: BlockPool
    transfers: Transfers
    block_size: int
    _owner: str | None = None
    _pinned: set[BlockHash] = field(default_factory=set)
    _writes: Counter[BlockHash] = field(default_factory=Counter)

    @property
    def max_blocks(self) -> int:
        """How many blocks of a sequence the SSD can hold for it."""
        tier = self.transfers.tier
        return tier.max_pinned(self.transfers.memory.bytes_per_block) if tier.is_open else 0

    def belongs_to(self, request: Request) -> bool:
        return self._owner == request.request_id

    def attach(self, request: Request, hashes: list[BlockHash]) -> int:
        """What the SSD has of a request without blocks becomes its cold prefix; returns its blocks."""
        assert not request.blocks and not request.num_cold_blocks, f"{request!r} has blocks already"
        assert self._owner is None, f"{self._owner} has the cold prefix"
        self._owner = request.request_id
        count = self.transfers.tier.index.pin_leading(hashes[: self.max_blocks])
        self._pinned.update(hashes[:count])
        request.num_cold_blocks = count
        return count

    def write_ahead(self, request: Request) -> bool:
        """Hand full blocks that are not on the SSD to it, as many as may wait; False once it has refused one. What
        comes after `max_blocks` never has to leave the memory."""
        tier, num_full = self.transfers.tier, request.num_computed_tokens // self.block_size
        max_blocks = self.max_blocks
        for depth in range(request.num_cold_blocks, num_full):
            block_hash = request.block_hashes[depth]
            if block_hash not in self._pinned:
                if len(self._pinned) >= max_blocks:
                    break
                self._pinned.add(block_hash)
                tier.index.pin(block_hash)
            if block_hash in tier:
                continue
            if not self.transfers.has_write_slot:
                break
            if not tier.wants(block_hash, at_once=True):
                continue  # on its way
            self._writes[block_hash] += 1
            if self._writes[block_hash] > MAX_WRITES:
                tier.declined(block_hash)
                return False
            self.transfers.write(block_hash, depth, request.blocks[depth - request.num_cold_blocks].block_id)
        return True

    def spill(self, request: Request, num_blocks: int) -> bool:
        """Leave the oldest `num_blocks` to the SSD; False if not all of them are there yet."""
        for _ in range(num_blocks):
            if request.block_hashes[request.num_cold_blocks] not in self.transfers.tier:
                return False
            self.pool.release([request.blocks.pop(0)])
            request.num_cold_blocks += 1
        return True

    def release(self, request: Request) -> None:
        """The sequence leaves: what it has on the SSD is as any other block there."""
        self.transfers.tier.index.touch(request.block_hashes[: request.num_cold_blocks])
        self.transfers.tier.index.unpin(self._pinned)
        self.transfers.layers.forget(self._pinned)
        self._pinned.clear()
        self._writes.clear()
        self._owner = None
        request.num_cold_blocks = 0

    def check(self, owner: Request | None) -> None:
        """What is pinned on the SSD is the owner's, and no more than may be; without one it is nothing."""
        assert self._owner == (None if owner is None else owner.request_id), f"{self._owner} has the cold prefix"
        assert self.transfers.tier.index.pinned == self._pinned, "what is pinned is not what the cold prefix has"
        assert len(self._pinned) <= (0 if owner is None else self.max_blocks), f"{len(self._pinned)} are pinned"
