"""Reading the cached keys and values of a sequence: a view if its blocks are consecutive, else a gather.

block table [4 5 6]      Run      one strided view, nothing copied
block table [9 2 7]      Gather   one index_select for K, V, every head and every sequence of a bucket
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from actors.model.kv.kv_cache import KVCache


@dataclass(frozen=True)
class Run:
    """A run of `length` consecutive tokens, starting at slot `start`."""

    start: int
    length: int

    def read(self, cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
        """Return K and V of the run in the layer `layer`, each [1, kv_heads, length, its dim], as views of the cache."""
        runs = cache.plane_runs(layer)
        keys, values = (run.narrow(1, self.start, self.length).unsqueeze(0) for run in (runs[0], runs[-1]))
        return keys, values


class Gather:
    """Whole blocks of some sequences, of which the tokens ``[first, stop)`` are read.

    All gathers from one cache share its buffer (`KVCache.scratch`): new memory for each layer or step costs page faults, and
    several at once have no bound. The result of `read` is therefore valid until the next `read` of any of them.
    """

    def __init__(self, cache: KVCache, block_tables: list[list[int]], first: int, stop: int) -> None:
        tables = torch.tensor(block_tables, device=cache.device)
        self.rows = cache.page_rows(tables)
        self.batch, self.blocks = tables.shape
        self._pages = cache.scratch(len(self.rows))
        tokens = [
            pages.view(planes, self.batch, cache.kv_heads, self.blocks * cache.block_size, dim)
            for pages, (planes, dim) in zip(self._pages, cache.stores, strict=True)
        ]
        self._found = (tokens[0][0, :, :, first:stop], tokens[-1][-1, :, :, first:stop])

    def read(self, cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
        """Return K and V of the tokens in the layer `layer`, each [sequences, kv_heads, stop - first, its dim]. The next `read`
        overwrites them."""
        for stored, pages in zip(cache.flat_pages(layer), self._pages, strict=True):
            torch.index_select(stored, 0, self.rows, out=pages)
        return self._found


Source = Run | Gather


def source(cache: KVCache, block_table: list[int], first: int, stop: int) -> Source:
    """Return the way to read the tokens ``[first, stop)`` of one sequence from `cache`, where ``first < stop``: a view (`Run`)
    if their blocks are consecutive, else a copy (`Gather`). `block_table` are the sequence's blocks."""
    size = cache.block_size
    blocks = block_table[first // size : -(-stop // size)]
    skip = first % size
    if consecutive(blocks):
        return Run(blocks[0] * size + skip, stop - first)
    return Gather(cache, [blocks], skip, skip + stop - first)


def consecutive(blocks: list[int]) -> bool:
    """Whether each block number is one more than the one before, so that the blocks are adjacent in memory."""
    return all(after == before + 1 for before, after in pairwise(blocks))
