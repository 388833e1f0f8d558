"""The cold tier as the cache manager sees it: which blocks go there, which come back and when that pays. No tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.api import ColdStats
from engine.cache.block import Block, BlockHash, BlockState
from engine.cache.cost import GateDecision, TransferCost
from engine.cache.load import Load
from engine.cache.pool import BlockPool
from engine.cache.transfers import Transfers

PREFETCH_SHARE = 0.25
"""Of all blocks, what loads may hold for requests that cannot start yet."""

WARM_UP = "warm-up"


@dataclass(slots=True)
class _Transit:
    """Blocks that one owner has on their way."""

    load: Load
    blocks: list[Block]


@dataclass(slots=True)
class ColdTier:
    """Moves blocks between a pool and the SSD. All methods belong to the engine's thread, none waits.

    A load reserves all of its blocks or none. What has landed becomes cached blocks of the pool, found as any others;
    until then nobody can find them, and they count as used."""

    pool: BlockPool
    transfers: Transfers
    block_size: int
    loaded_blocks: int = 0
    is_warm: bool = False
    _transits: dict[str, _Transit] = field(default_factory=dict)
    _landed_for: dict[str, int] = field(default_factory=dict)
    _planned: list[tuple[BlockHash, int, Block]] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"ColdTier(loading={self.num_loading_blocks}, planned={len(self._planned)}, {self.transfers.tier!r})"

    @property
    def cost(self) -> TransferCost:
        return self.transfers.cost

    @property
    def num_loading_blocks(self) -> int:
        return sum(len(transit.blocks) for transit in self._transits.values())

    def loading_blocks(self) -> dict[int, int]:
        """Block id to references held by loads."""
        return {block.block_id: 1 for transit in self._transits.values() for block in transit.blocks}

    def consider(self, block: Block, depth: int, *, at_once: bool = False) -> None:
        """A committed block was written, found, or is about to lose its reader: plan its copy if the SSD wants it."""
        block_hash = block.block_hash
        if block.state is not BlockState.COMMITTED or block_hash is None:
            return
        if self.transfers.tier.wants(block_hash, at_once=at_once):
            self._planned.append((block_hash, depth, block))

    def copy_planned(self) -> None:
        """Hand the planned copies over. Called before anything may write to the blocks of the pool."""
        for block_hash, depth, block in self._planned:
            if block.block_hash == block_hash:
                self.transfers.write(block_hash, depth, block.block_id)
            else:
                self.transfers.tier.declined(block_hash)
        self._planned.clear()

    def swap_out(self, blocks: Sequence[Block], num_tokens: int) -> bool:
        """Copy all committed blocks of a request that is preempted, if loading them is cheaper later. At once: the step
        that is planned may give them to somebody else."""
        if not blocks or self.transfers.is_hung or not self.cost.is_cheaper(len(blocks), num_tokens):
            return False
        for depth, block in enumerate(blocks):
            self.consider(block, depth, at_once=True)
        self.copy_planned()
        return True

    def start(self, owner: str, hashes: Sequence[BlockHash], *, may_start: bool) -> GateDecision | None:
        """Begin to load the leading `hashes` that are on the SSD, if that is cheaper than computing their tokens and
        there is room; None where none of them is. Only one that may start now loads beyond the prefetch share."""
        count = self.transfers.tier.index.num_leading(hashes)
        if not count:
            return None
        decision = self._decide(owner, hashes[:count], may_start=may_start)
        self.cost.decide(decision)
        if decision is GateDecision.RECOMPUTE:
            self.transfers.probe()
        return decision

    def warm_up(self) -> None:
        """Begin to load the most used blocks of all, once, as soon as the tier is open."""
        if self.is_warm or not self.transfers.tier.is_open:
            return
        self.is_warm = True
        hashes = self.transfers.tier.index.hottest(int(PREFETCH_SHARE * len(self.pool.blocks)))
        if hashes:
            self.start(WARM_UP, hashes, may_start=False)

    def _decide(self, owner: str, hashes: Sequence[BlockHash], *, may_start: bool) -> GateDecision:
        if self.transfers.is_hung:
            return GateDecision.OFF
        ahead = self.transfers.num_in_flight
        if not self.cost.is_cheaper(len(hashes), len(hashes) * self.block_size, num_ahead=ahead):
            return GateDecision.RECOMPUTE
        early = self.num_loading_blocks + sum(self._landed_for.values())
        if not may_start and early + len(hashes) > PREFETCH_SHARE * len(self.pool.blocks):
            return GateDecision.SHORTAGE
        blocks = self.pool.allocate(len(hashes))
        if blocks is None:
            return GateDecision.SHORTAGE
        load = self.transfers.start(hashes, [block.block_id for block in blocks])
        self._transits[owner] = _Transit(load, blocks)
        return GateDecision.LOAD

    def take_landed(self) -> list[str]:
        """Owners whose loads are over; what came is cached now, what did not is free."""
        self.warm_up()
        over = {id(load) for load in self.transfers.poll()}
        owners = [owner for owner, transit in self._transits.items() if id(transit.load) in over]
        for owner in owners:
            transit = self._transits.pop(owner)
            num_landed = transit.load.num_landed
            hashes = transit.load.hashes[:num_landed]
            for block, block_hash in zip(transit.blocks, hashes, strict=False):
                if self.pool.publish(block, block_hash):
                    self.pool.commit(block)
                    block.loaded = True
            self.pool.release(transit.blocks)
            self.transfers.tier.index.touch(hashes)
            self.loaded_blocks += num_landed
            if owner != WARM_UP:
                self._landed_for[owner] = num_landed
        return owners

    def cancel(self, owner: str) -> None:
        """Give up an owner's load: its blocks are free at once."""
        transit = self._transits.pop(owner, None)
        if transit is not None:
            self.transfers.abandon(transit.load)
            self.pool.release(transit.blocks)
        self.settle(owner)

    def num_blocks_of(self, owner: str) -> int:
        transit = self._transits.get(owner)
        return 0 if transit is None else len(transit.blocks)

    def latest_owner(self) -> str | None:
        return next(reversed(self._transits), None)

    def settle(self, owner: str) -> None:
        """The owner has taken its blocks, or will not: they no longer count as loaded ahead of need."""
        self._landed_for.pop(owner, None)

    def stats(self) -> ColdStats:
        transfers, tier, cost = self.transfers, self.transfers.tier, self.cost
        counters = tier.counters
        return ColdStats(
            num_blocks=tier.num_blocks,
            file_bytes=tier.file_bytes,
            capacity_bytes=tier.capacity_bytes,
            is_hung=transfers.is_hung,
            loaded_blocks_total=self.loaded_blocks,
            loads_total=transfers.counters.loads,
            late_loads_total=transfers.counters.late_loads,
            corrupt_blocks_total=counters.corrupt,
            missing_blocks_total=counters.missing,
            evictions_total=counters.evictions,
            dropped_writes_total=transfers.num_dropped_writes,
            failed_writes_total=counters.write_errors,
            read_bytes_total=counters.bytes_read,
            written_bytes_total=counters.bytes_written,
            rewritten_bytes_total=counters.bytes_rewritten,
            streamed_bytes_total=transfers.layers.num_bytes,
            read_seconds_total=transfers.counters.read_seconds,
            read_latency_counts=tuple(transfers.counters.latency_counts),
            gate_decisions={decision.value: count for decision, count in cost.decisions.items()},
        )

    def check(self) -> None:
        """Blocks of loads are private and referenced once; the tier below adds up."""
        for owner, transit in self._transits.items():
            for block in transit.blocks:
                assert block.state is BlockState.PRIVATE and block.num_refs == 1, f"{block}, which {owner} loads"
        self.transfers.tier.check()

    def close(self) -> None:
        for owner in list(self._transits):
            self.cancel(owner)
        self.copy_planned()
        self.transfers.close()
