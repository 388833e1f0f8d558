"""What a step of a sequence that is larger than the KV memory computes on: a few layers at a time of all its blocks.

Two windows take turns. While the layers of one are computed, the other one is filled from the SSD.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from engine.batch import ScheduledRow
from engine.cache.layer_stream import LayerStream, Part, PartLoad
from engine.cache.spec import CacheSpec
from engine.kv_memory import KVCacheMemory
from kernels.kv import LayerKV

MEMORY_SHARE = 0.5
"""Of the KV memory, what the two windows may take beside it, from the first long sequence on. One layer each they take
at any rate, of all blocks of the sequence, which nothing but its length bounds. More makes fewer and larger reads."""
GROWTH_BLOCKS = 64
"""Their number of blocks is a multiple of it: the next sequence, which may be a little longer, fits as well."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbouring layers that come from the SSD in one read of a block."""

    first: int
    last: int
    part: Part
    spec: CacheSpec


def _groups(spec: CacheSpec, num_layers: int) -> list[_Group]:
    """All layers in groups of at most `num_layers`."""
    offsets, total = spec.layer_offsets(), len(spec.layer_dtypes)
    bounds = [*range(0, total, num_layers), total]
    return [
        _Group(
            first,
            last,
            Part(offsets[first], offsets[last - 1] + spec.layer_bytes(last - 1)),
            replace(spec, layer_dtypes=spec.layer_dtypes[first:last]),
        )
        for first, last in pairwise(bounds)
    ]


class LayerWindows:
    """The windows over blocks numbered 0, 1, ... as they follow in their sequence, kept from step to step."""

    def __init__(self, memory: KVCacheMemory, num_blocks: int) -> None:
        self.memory, self.num_blocks = memory, num_blocks
        spec = memory.spec
        budget = MEMORY_SHARE * memory.num_blocks * spec.bytes_per_block
        num_layers = int(budget / (2 * num_blocks * max(spec.layer_bytes(i) for i in range(len(spec.layer_dtypes)))))
        self.groups = _groups(spec, max(1, num_layers))
        self.parts = [group.part for group in self.groups]
        size = max(num_blocks * group.spec.bytes_per_block for group in self.groups)
        pair = [torch.zeros(size, dtype=torch.uint8) for _ in self.groups[:2]]
        self.windows = [
            KVCacheMemory(group.spec, num_blocks, 0, memory=pair[number % 2][: num_blocks * group.spec.bytes_per_block])
            for number, group in enumerate(self.groups)
        ]
        self.layers = [
            LayerKV(kv.body, kv.scales, memory.layers[group.first + index].tail, kv.group_size)
            for group, window in zip(self.groups, self.windows, strict=True)
            for index, kv in enumerate(window.layers)
        ]

    @classmethod
    def for_blocks(cls, memory: KVCacheMemory, num_blocks: int) -> "LayerWindows":
        """At least so many."""
        return cls(memory, -(-num_blocks // GROWTH_BLOCKS) * GROWTH_BLOCKS)


class StreamedPass:
    """The KV cache of one step, seen through the windows. `enter` comes before a layer is computed, `leave` after."""

    def __init__(self, windows: LayerWindows, stream: LayerStream, row: ScheduledRow, block_size: int) -> None:
        self._windows, self._stream, self._hashes = windows, stream, row.cold_hashes
        num_cold, num_blocks = len(row.cold_hashes), len(row.cold_hashes) + len(row.block_table)
        self._resident_ids = torch.tensor(row.block_table, dtype=torch.int64)
        self._resident_places = torch.arange(num_cold, num_blocks)
        first = row.start // block_size - num_cold  # of the blocks that the step writes
        self._written_ids, self._written_places = self._resident_ids[first:], self._resident_places[first:]
        self._group_of = {group.first: number for number, group in enumerate(windows.groups)}
        self._loads: dict[int, PartLoad] = {}
        self._current = 0
        self._fetch(0)

    @property
    def layers(self) -> Sequence[LayerKV]:
        """Those of the layer that was entered last may be used."""
        return self._windows.layers

    def enter(self, layer: int) -> None:
        """Wait for what comes from the SSD, and begin with what comes after. Raises ColdReadError."""
        number = self._group_of.get(layer)
        if number is None:
            return
        self._current = number
        self._stream.wait(self._loads.pop(number))
        self._fetch(number + 1)
        part, window = self._windows.parts[number], self._windows.windows[number]
        resident = self._windows.memory.bytes_of(self._resident_ids, part.start, part.end)
        window.put_bytes(self._resident_places, 0, resident)

    def leave(self, layer: int) -> None:
        """What the layer has written goes to the KV memory, once its group is done."""
        group = self._windows.groups[self._current]
        if layer + 1 < group.last:
            return
        window = self._windows.windows[self._current]
        written: Tensor = window.bytes_of(self._written_places, 0, group.part.end - group.part.start)
        self._windows.memory.put_bytes(self._written_ids, group.part.start, written)

    def close(self) -> None:
        """The step has failed: nothing is written to the windows any more."""
        for load in self._loads.values():
            load.give_up()

    def _fetch(self, number: int) -> None:
        if number < len(self._windows.groups):
            place_of = self._windows.windows[number].block_bytes
            self._loads[number] = self._stream.fetch(self._hashes, self._windows.parts, number, place_of)
