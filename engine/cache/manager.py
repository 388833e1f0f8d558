"""Which blocks each request reads and writes. Plans only; copies nothing."""

from collections.abc import Iterable, Sequence

from engine.cache.block import BlockHash, child_hash
from engine.cache.cold import ColdTier
from engine.cache.cold_prefix import ColdPrefix
from engine.cache.cost import GateDecision
from engine.cache.pool import BlockPool
from engine.request import Request


class KVCacheManager:
    """Block tables over one pool, prefix sharing included.

    A block that the coming step fills is PENDING: later rows of the same batch may read it. `commit_step` makes it
    visible to all, `discard_step` makes it unfindable. A hash is *promised* while a request that will write it is still
    in its prompt, or while it comes from the cold tier. A step may be parked half-way while another one runs: what it
    has not written yet nobody finds.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.cold: ColdTier | None = None
        self.cold_prefix: ColdPrefix | None = None
        self._pending: list[tuple[Request, int]] = []  # and the block's place in `Request.blocks`
        self._parked: list[tuple[Request, int]] = []
        self._unwritten: set[int] = set()
        self._promises: dict[BlockHash, str] = {}
        self._promised_by: dict[str, list[BlockHash]] = {}

    @property
    def utilisation(self) -> float:
        """Blocks that cannot be reclaimed now, over all."""
        return self.pool.num_used / len(self.pool.blocks)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def prompt_hashes(self, request: Request) -> list[BlockHash]:
        """The request's own chain over its full blocks so far, extended on demand."""
        chain = request.block_hashes
        size = self.block_size
        for index in range(len(chain), request.num_tokens // size):
            parent = chain[-1] if chain else request.root
            chain.append(child_hash(parent, request.tokens(index * size, (index + 1) * size)))
        return chain

    def waits_for_promise(self, request: Request) -> bool:
        """Whether the first block that this request misses is being written by another one."""
        if not self.enable_prefix_caching:
            return False
        for block_hash in self._usable_hashes(request):
            if self.pool.find(block_hash) is None:
                return self._promises.get(block_hash, request.request_id) != request.request_id
        return False

    def attach_prefix(self, request: Request) -> int:
        """Take references on the longest known prefix of a request without blocks; returns its tokens."""
        assert not request.blocks, f"{request!r} has blocks already"
        if not self.enable_prefix_caching:
            return 0
        for block_hash in self._usable_hashes(request):
            block = self.pool.find(block_hash)
            if block is None or block.block_id in self._unwritten:
                break
            self.pool.acquire(block)
            request.blocks.append(block)
        request.num_computed_tokens = len(request.blocks) * self.block_size
        return request.num_computed_tokens

    def attach_cold_prefix(self, request: Request, max_blocks: int) -> int:
        """The same for a sequence that is larger than the memory: its prefix on the SSD stays there, and at most
        `max_blocks` that follow are found in memory."""
        assert self.cold_prefix is not None, "only with an SSD tier"
        hashes = self._usable_hashes(request)
        num_cold = self.cold_prefix.attach(request, hashes)
        for block_hash in hashes[num_cold : num_cold + max_blocks]:
            block = self.pool.find(block_hash)
            if block is None or block.block_id in self._unwritten:
                break
            self.pool.acquire(block)
            request.blocks.append(block)
        request.num_computed_tokens = (num_cold + len(request.blocks)) * self.block_size
        return request.num_computed_tokens

    def settle_prefix(self, request: Request) -> int:
        """The request runs with the prefix it has attached: its blocks were used, and may be worth a colder tier.
        Returns the tokens that came from there and are used for the first time."""
        num_loaded = sum(block.loaded for block in request.blocks) * self.block_size
        for block in request.blocks:
            block.loaded = False
        if self.cold is not None:
            num_found = request.num_computed_tokens // self.block_size
            self.cold.settle(request.request_id)
            self.cold.transfers.tier.index.touch(self.prompt_hashes(request)[:num_found])
            for depth, block in enumerate(request.blocks[:num_found]):
                self.cold.consider(block, depth)
        return num_loaded

    def start_load(self, request: Request, *, may_start: bool) -> GateDecision | None:
        """Begin to fetch what the pool misses of a waiting request's prefix from the cold tier, if that pays."""
        if self.cold is None or not self.enable_prefix_caching:
            return None
        owner, hashes = request.request_id, self._usable_hashes(request)
        found = next((i for i, h in enumerate(hashes) if self.pool.find(h) is None), len(hashes))
        missing = hashes[found:]
        if not missing or missing[0] in self._promises:
            return None
        # a load must not evict the prefix that it continues
        prefix = [block for h in hashes[:found] if (block := self.pool.find(h)) is not None]
        for block in prefix:
            self.pool.acquire(block)
        decision = self.cold.start(owner, missing, may_start=may_start)
        self.pool.release(prefix)
        if decision is GateDecision.LOAD:
            self._promise(owner, missing[: self.cold.num_blocks_of(owner)])
        return decision

    def warm_up(self) -> None:
        """Begin to fetch the most used prefixes of earlier processes, within the prefetch share of the blocks."""
        if self.cold is not None:
            self.cold.warm_up()

    def take_landed(self) -> list[str]:
        """Owners whose loads are over: requests that may be scheduled now, or prefetches."""
        owners = [] if self.cold is None else self.cold.take_landed()
        for owner in owners:
            self._withdraw(owner)
        return owners

    def cancel_load(self, owner: str) -> None:
        if self.cold is not None:
            self.cold.cancel(owner)
            self._withdraw(owner)

    def swap_out(self, request: Request) -> None:
        """Before a preempted request gives its blocks up: keep them in the cold tier where that is the cheaper way."""
        if self.cold is not None and self.enable_prefix_caching:
            full = request.blocks[: request.num_computed_tokens // self.block_size]
            self.cold.swap_out(full, len(full) * self.block_size)

    def num_missing_blocks(self, request: Request, num_new_tokens: int) -> int:
        num_held = request.num_cold_blocks + len(request.blocks)
        return max(0, self.blocks_for(request.num_computed_tokens + num_new_tokens) - num_held)

    def allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Blocks for the next tokens, and PENDING hashes for those that they fill; False and unchanged on shortage."""
        blocks = self.pool.allocate(self.num_missing_blocks(request, num_new_tokens))
        if blocks is None:
            return False
        request.blocks.extend(blocks)
        if self.enable_prefix_caching:
            self._publish(request, request.num_computed_tokens + num_new_tokens)
        return True

    def promise(self, request: Request) -> None:
        """Announce the prompt blocks that this request is going to fill, the one it has begun included."""
        if self.enable_prefix_caching:
            first = request.num_computed_tokens // self.block_size
            self._promise(request.request_id, self._usable_hashes(request)[first:])

    def _promise(self, owner: str, hashes: Sequence[BlockHash]) -> None:
        mine = self._promised_by.setdefault(owner, [])
        for block_hash in hashes:
            if block_hash not in self._promises:
                self._promises[block_hash] = owner
                mine.append(block_hash)

    def commit_step(self) -> None:
        for request, index in self._pending:
            if index < len(request.blocks):
                self.pool.commit(request.blocks[index])
                if self.cold is not None:
                    self.cold.consider(request.blocks[index], request.num_cold_blocks + index)
        self._pending.clear()

    def discard_step(self) -> None:
        for request, index in self._pending:
            if index < len(request.blocks):
                self.pool.discard(request.blocks[index])
        self._pending.clear()

    def park_step(self) -> None:
        """The step stops half-way and another one runs; `commit_step` and `discard_step` are then of that one."""
        assert not self._parked, "a step is parked already"
        self._parked, self._pending = self._pending, []
        self._unwritten = {request.blocks[index].block_id for request, index in self._parked}

    def resume_step(self) -> None:
        """The parked step goes on."""
        self._parked, self._pending = self._pending, self._parked
        assert not self._parked, "the step that ran between has not ended"
        self._unwritten.clear()

    def release(self, request: Request) -> None:
        """Give up all blocks and promises of a request; never in the middle of a step that writes them."""
        self.pool.release(request.blocks)
        request.blocks = []
        if self.cold_prefix is not None and self.cold_prefix.belongs_to(request):
            self.cold_prefix.release(request)
        request.num_computed_tokens = 0
        self.withdraw_promises(request)

    def withdraw_promises(self, request: Request) -> None:
        self._withdraw(request.request_id)

    def _withdraw(self, owner: str) -> None:
        for block_hash in self._promised_by.pop(owner, ()):
            self._promises.pop(block_hash, None)

    def _usable_hashes(self, request: Request) -> list[BlockHash]:
        """Hashes that may be read from the cache: the last token is always computed, for its logits."""
        return self.prompt_hashes(request)[: (request.num_tokens - 1) // self.block_size]

    def _publish(self, request: Request, num_tokens: int) -> None:
        hashes = self.prompt_hashes(request)
        first = request.num_computed_tokens // self.block_size
        for depth in range(first, min(num_tokens // self.block_size, len(hashes))):
            index = depth - request.num_cold_blocks
            if self.pool.publish(request.blocks[index], hashes[depth]):
                self._pending.append((request, index))

    def check(self) -> None:
        """Free, cached and used blocks add up on every tier; every promise has its owner."""
        self.pool.check()
        if self.cold is not None:
            self.cold.check()
        for request_id, hashes in self._promised_by.items():
            for block_hash in hashes:
                assert self._promises.get(block_hash) == request_id, f"promise of {request_id} was lost"
        assert sum(len(hashes) for hashes in self._promised_by.values()) == len(self._promises), (
            "a promise without owner"
        )

    def check_readers(self, requests: Iterable[Request]) -> None:
        """References of blocks are those of these requests and of loads."""
        refs = {} if self.cold is None else self.cold.loading_blocks()
        for request in requests:
            for block in request.blocks:
                refs[block.block_id] = refs.get(block.block_id, 0) + 1
        for block in self.pool.blocks:
            assert block.num_refs == refs.get(block.block_id, 0), f"{block} has other readers than the tables say"
