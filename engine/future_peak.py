"""How many blocks the running requests will hold at most, if answers get as long as history says."""

from collections.abc import Sequence

from engine.cache.manager import KVCacheManager
from engine.predictors import OutputLengthPredictor
from engine.request import Request


def future_peak_blocks(requests: Sequence[Request], cache: KVCacheManager, lengths: OutputLengthPredictor) -> int:
    """The largest sum, over time, of the blocks that these requests hold.

    Longest remaining first, it is the largest, over i, of what the first i requests hold when the i-th ends; blocks
    that several read count once.
    """
    size, peak, held = cache.block_size, 0, 0
    shared: set[int] = set()
    need = []
    for request in requests:
        private = max(0, cache.blocks_for(request.num_tokens) - len(request.blocks))
        for block in request.blocks:
            if block.num_refs > 1:
                shared.add(block.block_id)
            else:
                private += 1
        need.append((lengths.remaining_tokens(request), private))
    for index, (remaining, private) in enumerate(sorted(need, reverse=True), start=1):
        held += private
        peak = max(peak, held + index * -(-remaining // size))
    return peak + len(shared)
