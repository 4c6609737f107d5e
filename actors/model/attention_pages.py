"""Where a sequence's cached keys and values are read from: a view where its blocks are consecutive, else a gather.

block table [4 5 6]      Run      one strided view, nothing copied
block table [9 2 7]      Gather   one index_select for K, V, every head and every sequence of a bucket
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from actors.model.kv_cache import KVCache


@dataclass(frozen=True)
class Run:
    """`length` tokens from slot `start` on, lying end to end."""

    start: int
    length: int

    def read(self, cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
        """K and V, each [1, kv_heads, length, head_dim]."""
        run = cache.runs(layer).narrow(2, self.start, self.length)
        return run[0].unsqueeze(0), run[-1].unsqueeze(0)


class Gather:
    """Whole blocks of some sequences, of which the tokens ``[first, stop)`` are read.

    All layers of a step gather into one buffer (fresh memory for each layer costs page faults), so what `read` returns holds
    until the next `read`.
    """

    def __init__(self, cache: KVCache, block_tables: list[list[int]], first: int, stop: int) -> None:
        tables = torch.tensor(block_tables, device=cache.device)
        self.rows = cache.page_rows(tables)
        self.batch, self.blocks = tables.shape
        self._first, self._stop = first, stop
        shape = (len(self.rows), cache.block_size * cache.head_dim)
        self._pages = torch.empty(shape, dtype=cache.dtype, device=cache.device)
        self._tokens = self._pages.view(
            cache.planes, self.batch, cache.kv_heads, self.blocks * cache.block_size, cache.head_dim
        )

    def read(self, cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
        """K and V, each [sequences, kv_heads, stop - first, head_dim]."""
        torch.index_select(cache.flat_pages(layer), 0, self.rows, out=self._pages)
        found = self._tokens[:, :, :, self._first : self._stop]
        return found[0], found[-1]


Source = Run | Gather


def source(cache: KVCache, block_table: list[int], first: int, stop: int) -> Source:
    """Where the tokens ``[first, stop)`` of one sequence lie; ``first < stop``."""
    size = cache.block_size
    blocks = block_table[first // size : -(-stop // size)]
    skip = first % size
    if consecutive(blocks):
        return Run(blocks[0] * size + skip, stop - first)
    return Gather(cache, [blocks], skip, skip + stop - first)


def consecutive(blocks: list[int]) -> bool:
    """Whether the blocks lie end to end in memory."""
    return all(after == before + 1 for before, after in pairwise(blocks))
