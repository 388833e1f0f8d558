"""The blocks of one tier: allocation, reference counts, the hash index, least-recently-used eviction."""

from collections import OrderedDict
from collections.abc import Sequence

from engine.cache.block import Block, BlockHash, BlockState


class BlockPool:
    """`num_blocks` blocks. A block without references that is still COMMITTED stays findable until it is evicted."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_evictions = 0
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._index: dict[BlockHash, int] = {}

    def __repr__(self) -> str:
        return f"BlockPool(used={self.num_used}, cached={self.num_cached}, empty={len(self._empty)})"

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now: empty ones, and cached ones without a reference."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self.blocks) - self.num_free

    def find(self, block_hash: BlockHash) -> Block | None:
        """The block with this content, PENDING ones included (rows of one batch may attend to each other's blocks)."""
        block_id = self._index.get(block_hash)
        return None if block_id is None else self.blocks[block_id]

    def acquire(self, block: Block) -> None:
        """Add a reference to a found block."""
        if block.num_refs == 0:
            del self._cached[block.block_id]
        block.num_refs += 1

    def allocate(self, count: int) -> list[Block] | None:
        """`count` private blocks with one reference each, or None and nothing changed."""
        if count > self.num_free:
            return None
        taken = []
        for _ in range(count):
            if self._empty:
                block = self.blocks[self._empty.pop()]
            else:
                block = self.blocks[self._cached.popitem(last=False)[0]]
                self._forget(block)
                self.num_evictions += 1
            block.state, block.num_refs = BlockState.PRIVATE, 1
            taken.append(block)
        return taken

    def publish(self, block: Block, block_hash: BlockHash) -> bool:
        """Make a full private block findable as PENDING; False if that content is in the index already."""
        if block.state is not BlockState.PRIVATE or block_hash in self._index:
            return False
        block.state, block.block_hash = BlockState.PENDING, block_hash
        self._index[block_hash] = block.block_id
        return True

    def commit(self, block: Block) -> None:
        """The step that wrote the block succeeded."""
        if block.state is BlockState.PENDING:
            block.state = BlockState.COMMITTED

    def discard(self, block: Block) -> None:
        """The step that wrote the block failed: nobody finds it again."""
        if block.state is BlockState.PENDING:
            self._forget(block)
            block.state = BlockState.PRIVATE

    def release(self, blocks: Sequence[Block]) -> None:
        """Drop one reference of each; leaves (last blocks) become the first to be evicted."""
        for block in reversed(blocks):
            block.num_refs -= 1
            if block.num_refs:
                continue
            if block.state is BlockState.COMMITTED:
                self._cached[block.block_id] = None
            else:
                self._forget(block)
                block.state = BlockState.FREE
                self._empty.append(block.block_id)

    def evict_all(self) -> None:
        """Forget every cached block that nobody references."""
        while self._cached:
            block = self.blocks[self._cached.popitem(last=False)[0]]
            self._forget(block)
            block.state = BlockState.FREE
            self._empty.append(block.block_id)
            self.num_evictions += 1

    def _forget(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._index[block.block_hash]
            block.block_hash = None
            block.loaded = False

    def check(self) -> None:
        """Every block is empty, cached or used, never two of them, and the index names exactly the findable ones."""
        empty, cached = set(self._empty), set(self._cached)
        assert len(empty) == len(self._empty), "a block is on the empty list twice"
        for block in self.blocks:
            in_empty, in_cached, used = block.block_id in empty, block.block_id in cached, block.num_refs > 0
            assert in_empty + in_cached + used == 1, f"{block} is in {in_empty + in_cached + used} places"
            findable = block.state in (BlockState.PENDING, BlockState.COMMITTED)
            assert findable == (block.block_hash is not None), f"{block} and its hash disagree"
            assert in_empty == (block.state is BlockState.FREE), f"{block} is free and not free"
            if block.block_hash is not None:
                assert self._index[block.block_hash] == block.block_id, f"{block} is not what the index says"
        assert len(self._index) == sum(block.block_hash is not None for block in self.blocks), "the index names ghosts"
