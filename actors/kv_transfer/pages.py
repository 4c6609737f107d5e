"""Translation of a copy of the hand-off map into byte ranges of two paged KV caches (`actors.model.kv.kv_cache`).

The pool of a layer is one tensor, [planes, kv_heads, num_pages, page_tokens, kv_dim]. The page ranges of a copy are the same in
every plane, head and layer, so they are computed once and repeated for all of them. Pages that are adjacent on both sides are
merged into one range, so two pools without fragmentation need few ranges.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.kv_transfer.transport import Ranges
from actors.model.kv.kv_cache import KVCache
from actors.wire.message import Message
from placement.ownership.handoff import Copy, Holding
from placement.ownership.handoff_pages import PageTable, page_ranges


class CacheShape(Message):
    """The geometry of a rank's pages in its pools. `token_bytes` is the size of one token of one head in one plane."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    planes: int
    num_pages: int
    page_tokens: int
    token_bytes: int

    @classmethod
    def of(cls, cache: KVCache, held: Holding) -> CacheShape:
        """Returns the geometry of `cache`, which stores the layers and KV heads that `held` names."""
        return cls(
            first_layer=held.layers.start,
            num_layers=len(held.layers),
            first_head=held.kv_heads.start,
            num_heads=len(held.kv_heads),
            planes=cache.planes,
            num_pages=cache.num_blocks,
            page_tokens=cache.block_size,
            token_bytes=cache.head_dim * cache.dtype.itemsize,
        )

    def runs_of(self, heads: range) -> NDArray[np.int64]:
        """Returns the byte offsets at which the pages of `heads` (heads of the whole model) begin in a layer's pool, plane by
        plane: [planes * heads]."""
        head_bytes = self.num_pages * self.page_tokens * self.token_bytes
        planes = np.arange(self.planes)[:, None] * self.num_heads
        own = np.arange(heads.start, heads.stop)[None, :] - self.first_head
        starts: NDArray[np.int64] = (planes + own).reshape(-1) * head_bytes
        return starts


def copy_ranges(copy: Copy, own: CacheShape, table: PageTable, peers: CacheShape, peer_table: PageTable) -> Ranges:
    """Returns the byte ranges that move `copy` from the pages of `table` in this rank's pools to the pages of `peer_table` in
    the peer's pools. `own` and `peers` are the geometries of the two caches."""
    runs = _merged(copy, own, table, peers, peer_table)
    starts, peer_starts = own.runs_of(copy.kv_heads), peers.runs_of(copy.kv_heads)
    count, heads = len(runs), len(starts)
    layer = np.empty((heads * count, 5), np.int64)
    layer[:, 1] = (starts[:, None] + runs[None, :, 0]).reshape(-1)
    layer[:, 3] = (peer_starts[:, None] + runs[None, :, 1]).reshape(-1)
    layer[:, 4] = np.tile(runs[:, 2], heads)
    everything = np.tile(layer, (len(copy.layers), 1))
    everything[:, 0] = everything[:, 2] = np.repeat(np.arange(copy.layers.start, copy.layers.stop), heads * count)
    return Ranges(everything)


def _merged(copy: Copy, own: CacheShape, table: PageTable, peers: CacheShape, peer_table: PageTable) -> NDArray[np.int64]:
    """Returns the ranges within the pages of one head, [ranges, 3]: offset on this side, offset on the peer's side, length."""
    page, peer_page = own.page_tokens * own.token_bytes, peers.page_tokens * peers.token_bytes
    rows: list[list[int]] = []
    for read, write in page_ranges(copy, table, peer_table, own.token_bytes):
        row = [read.page * page + read.offset, write.page * peer_page + write.offset, read.length]
        if rows and all(rows[-1][side] + rows[-1][2] == row[side] for side in (0, 1)):
            rows[-1][2] += row[2]
        else:
            rows.append(row)
    return np.array(rows, np.int64).reshape(-1, 3)


def copy_slots(copy: Copy, table: PageTable) -> Tensor:
    """Returns the cache slots of a copy's positions on one side, whose pages of the sequence are `table`: [positions] int64, in
    the order of the positions."""
    own = table.ownership.blocks(list(table.pages))
    slots = [table.slot(position, own) for span in copy.positions.spans() for position in span]
    return torch.tensor(slots, dtype=torch.int64)
