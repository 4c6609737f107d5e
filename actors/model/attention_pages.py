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
        return run[0].unsqueeze(0), run[1].unsqueeze(0)


@dataclass(frozen=True)
class Gather:
    """Whole blocks of `batch` sequences, of which the tokens ``[skip, skip + length)`` are read."""

    rows: Tensor
    """Rows of `KVCache.flat_pages`."""
    batch: int
    skip: int
    length: int

    def read(self, cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
        """K and V, each [batch, kv_heads, length, head_dim]."""
        pages = cache.flat_pages(layer).index_select(0, self.rows)
        tokens = pages.view(2, self.batch, cache.kv_heads, -1, cache.head_dim).narrow(3, self.skip, self.length)
        return tokens[0], tokens[1]


Source = Run | Gather


def source(cache: KVCache, block_table: list[int], first: int, stop: int) -> Source:
    """Where the tokens ``[first, stop)`` of one sequence lie; ``first < stop``."""
    size = cache.block_size
    blocks = block_table[first // size : -(-stop // size)]
    skip = first % size
    if consecutive(blocks):
        return Run(blocks[0] * size + skip, stop - first)
    return Gather(cache.page_rows(torch.tensor([blocks], device=cache.device)), 1, skip, stop - first)


def consecutive(blocks: list[int]) -> bool:
    """Whether the blocks lie end to end in memory."""
    return all(after == before + 1 for before, after in pairwise(blocks))
