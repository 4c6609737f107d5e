"""Movement of one rank's KV blocks between its cache and the tiers, by the hand-off map.

In the hand-off map, a tier is a side with a single rank that holds everything. A rank writes the copies that it would send to
that side (ranks that hold the same KV split it by layers), and reads the copies that it would receive from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm

import torch

from actors.kv_offload.block_part import BlockName, BlockPart
from actors.kv_offload.tiers import Tiers
from actors.kv_transfer.pages import copy_slots
from actors.kv_transfer.staging import gather, scatter
from actors.kv_transfer.transport import flat_bytes
from actors.model.kv.kv_cache import KVCache
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec
from placement.ownership.handoff import Copy, Side, handoff
from placement.ownership.handoff_pages import PageTable


class RankBlocks:
    """The blocks of the rank `world_rank` of `side`, whose pages are in `cache`. The cache's KV heads begin at `first_head`."""

    def __init__(self, tiers: Tiers, spec: ModelSpec, side: Side, world_rank: int, cache: KVCache, first_head: int) -> None:
        self._tiers, self._cache, self._first_head = tiers, cache, first_head
        self._tokens = tiers.kv_format.block_tokens
        tier = Side(Layout(), self._tokens)
        # Ownership repeats after this many positions, and so do the parts of a block that a rank writes or reads.
        window = range(lcm(side.layout.kv_owners * side.page_tokens, self._tokens))
        self._writes = [copy for copy in handoff(spec, side, tier, window) if copy.source == world_rank]
        self._reads = [copy for copy in handoff(spec, tier, side, window) if copy.destination == world_rank]

    def parts(self, place: int) -> list[BlockPart]:
        """Returns the parts that the rank needs of the block with index `place` in a sequence; none if only other ranks hold
        it."""
        return [part for _, part in self._of_block(self._reads, place)]

    def save(self, places: range, names: Sequence[BlockName], table: PageTable) -> int:
        """Save this rank's parts of the blocks with indices `places` in a sequence: all of them to host memory, and its share
        to the shared tier. Returns the number of bytes queued for the shared tier.

        `names` are the names of these blocks, and `table` the pages of the sequence. The values must have been computed. Parts
        for which a tier has no room are left out. Raises `ValueError` if `places` and `names` differ in length.
        """
        total = 0
        for place, name in zip(places, names, strict=True):
            kept: dict[BlockPart, bytes] = {}
            for copy, part in self._of_block(self._reads, place):
                kept[part] = self._taken(copy, table)
                self._tiers.keep(name, part, kept[part])
            for copy, part in self._of_block(self._writes, place):
                data = kept[part] if part in kept else self._taken(copy, table)
                total += len(data) if self._tiers.share(name, part, data, place) else 0
        return total

    def load(self, places: range, names: Sequence[BlockName], table: PageTable) -> int:
        """Fill this rank's pages with the blocks with indices `places` in a sequence. Returns the number of blocks filled,
        counted from the first. `names` are the names of these blocks, and `table` the pages of the sequence.

        Loading stops at the first block that cannot be loaded whole; its pages and all later ones are not modified. The ranks
        of a side must agree on the least of their counts. Raises `ValueError` if `places` and `names` differ in length.
        """
        for index, (place, name) in enumerate(zip(places, names, strict=True)):
            needed = list(self._of_block(self._reads, place))
            found = [self._tiers.fetch(name, part, place) for _, part in needed]
            if any(data is None for data in found):
                return index
            for (copy, _), data in zip(needed, found, strict=True):
                if data is not None:
                    self._put(copy, data, table)
        return len(places)

    def _taken(self, copy: Copy, table: PageTable) -> bytes:
        values = torch.empty(self._shape(copy), dtype=self._cache.dtype, device=self._cache.device)
        gather(self._cache, self._first_head, copy, copy_slots(copy, table), values)
        return bytes(flat_bytes(values.cpu()).numpy().tobytes())

    def _put(self, copy: Copy, data: bytes, table: PageTable) -> None:
        values = torch.frombuffer(bytearray(data), dtype=self._cache.dtype).view(self._shape(copy)).to(self._cache.device)
        scatter(self._cache, self._first_head, copy, copy_slots(copy, table), values)

    def _shape(self, copy: Copy) -> tuple[int, ...]:
        return len(copy.layers), self._cache.planes, len(copy.kv_heads), len(copy.positions), self._cache.head_dim

    def _of_block(self, copies: Sequence[Copy], place: int) -> Iterator[tuple[Copy, BlockPart]]:
        """Yields the parts of `copies` within the block at `place`, each a contiguous run of positions, with its block part."""
        start = place * self._tokens
        for copy in copies:
            for span in copy.positions.anywhere(range(start, start + self._tokens)).spans():
                one = Copy(copy.source, copy.destination, copy.layers, copy.kv_heads, copy.positions.anywhere(span))
                yield one, BlockPart(copy.layers, copy.kv_heads, range(span.start - start, span.stop - start))
