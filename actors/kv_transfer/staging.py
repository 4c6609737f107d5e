"""The staging buffer: small slices are gathered into one run of memory, sent as one range, and scattered where they arrive.

A range costs the transport about as much as some tens of kilobytes (`STAGE_BELOW`), and a copy can be thousands of short ones
(one head in pages of 16 tokens of 64 bfloat16 values: 2 KiB). Gathered, a copy is

    [layers of the copy, planes, heads of the copy, positions, kv_dim]

on both sides, exactly its bytes. The rule: a copy is staged where its ranges are shorter than `STAGE_BELOW` on average, there
is more than one, and both sides have room; else its ranges go straight into the pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.model.kv.kv_cache import KVCache
from placement.ownership.handoff import Copy

STAGE_BELOW = 32 * 1024
"""Bytes of a range from which on it goes by itself."""

_ALIGN = 64


def is_small(num_ranges: int, num_bytes: int) -> bool:
    """Whether a copy of so many ranges is better sent as one."""
    return num_ranges > 1 and num_bytes < num_ranges * STAGE_BELOW


class Staging:
    """A buffer of `memory` [bytes] in which runs are reserved and released, first fit."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._taken: dict[int, int] = {}
        """Start of each reserved run -> its end."""

    @property
    def num_reserved(self) -> int:
        """Bytes that are reserved, alignment included."""
        return sum(end - start for start, end in self._taken.items())

    def reserve(self, num_bytes: int) -> int | None:
        """Where a run of so many bytes begins; None: there is no room now."""
        size, start = -(-num_bytes // _ALIGN) * _ALIGN, 0
        for taken, end in sorted(self._taken.items()):
            if taken - start >= size:
                break
            start = end
        if start + size > self.memory.numel():
            return None
        self._taken[start] = start + size
        return start

    def release(self, start: int) -> None:
        """Give back the run that begins at `start`. Raises `KeyError` where none does."""
        del self._taken[start]

    def view(self, start: int, cache: KVCache, copy: Copy) -> Tensor:
        """The run of a copy as [layers, planes, heads, positions, kv_dim] in the cache's dtype."""
        shape = (len(copy.layers), cache.planes, len(copy.kv_heads), len(copy.positions), cache.head_dim)
        size = cache.dtype.itemsize
        for extent in shape:
            size *= extent
        return self.memory[start : start + size].view(cache.dtype).view(shape)


def gather(cache: KVCache, first_head: int, copy: Copy, slots: Tensor, into: Tensor) -> None:
    """Put a copy's values, which lie at `slots` of the cache whose heads begin at `first_head`, into a staged run."""
    heads = slice(copy.kv_heads.start - first_head, copy.kv_heads.stop - first_head)
    for staged, layer in zip(into, copy.layers, strict=True):
        torch.index_select(cache.runs(layer)[:, heads], 2, slots.to(cache.device), out=staged)


def scatter(cache: KVCache, first_head: int, copy: Copy, slots: Tensor, staged: Tensor) -> None:
    """The way back: put a staged run into the cache's `slots`."""
    heads = slice(copy.kv_heads.start - first_head, copy.kv_heads.stop - first_head)
    for values, layer in zip(staged, copy.layers, strict=True):
        cache.runs(layer)[:, heads].index_copy_(2, slots.to(cache.device), values)
