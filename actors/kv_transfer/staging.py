"""The staging buffer of KV transfers: small slices are gathered into one run of memory, sent as one range, and scattered.

The fixed cost of a range in the transport equals that of some tens of kilobytes (`STAGE_BELOW`), and a copy can consist of
thousands of short ranges (one head in pages of 16 tokens of 64 bfloat16 values: 2 KiB). A gathered copy is

    [layers of the copy, planes, heads of the copy, positions, kv_dim]

on both sides, without padding. A copy is staged if it has more than one range, its ranges are shorter than `STAGE_BELOW` on
average, and both sides have room. Otherwise its ranges are written straight into the pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.model.kv.kv_cache import KVCache
from placement.ownership.handoff import Copy

STAGE_BELOW = 32 * 1024
"""Average range size, in bytes, below which a copy is staged."""

_ALIGN = 64


def is_small(num_ranges: int, num_bytes: int) -> bool:
    """Returns whether a copy of `num_bytes` bytes in `num_ranges` byte ranges is cheaper to send as one staged range."""
    return num_ranges > 1 and num_bytes < num_ranges * STAGE_BELOW


class Staging:
    """A first-fit allocator of runs in the buffer `memory` [bytes]."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._taken: dict[int, int] = {}
        """End of each reserved run, by its start."""

    @property
    def num_reserved(self) -> int:
        """Number of reserved bytes, alignment included."""
        return sum(end - start for start, end in self._taken.items())

    def reserve(self, num_bytes: int) -> int | None:
        """Reserve a run of `num_bytes` bytes, rounded up for alignment. Returns the offset of its first byte, or None if there
        is no room at the moment."""
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
        """Release the run that begins at byte `start`. Raises `KeyError` if no run begins there."""
        del self._taken[start]

    def view(self, start: int, cache: KVCache, copy: Copy) -> Tensor:
        """Returns the values of `copy` staged from byte `start` on, as a view of the buffer: [layers, planes, heads, positions,
        kv_dim] in the dtype of `cache`."""
        shape = (len(copy.layers), cache.planes, len(copy.kv_heads), len(copy.positions), cache.head_dim)
        size = cache.dtype.itemsize
        for extent in shape:
            size *= extent
        return self.memory[start : start + size].view(cache.dtype).view(shape)


def gather(cache: KVCache, first_head: int, copy: Copy, slots: Tensor, into: Tensor) -> None:
    """Copy the values of `copy` from `slots` of the cache, [positions] as `copy_slots` returns them, into `into`, [layers,
    planes, heads, positions, kv_dim]. `first_head` is the model's KV head with which the cache begins."""
    heads = slice(copy.kv_heads.start - first_head, copy.kv_heads.stop - first_head)
    for staged, layer in zip(into, copy.layers, strict=True):
        torch.index_select(cache.runs(layer)[:, heads], 2, slots.to(cache.device), out=staged)


def scatter(cache: KVCache, first_head: int, copy: Copy, slots: Tensor, staged: Tensor) -> None:
    """Copy the staged values of `copy`, [layers, planes, heads, positions, kv_dim], into `slots` of the cache: the inverse of
    `gather`, which explains the parameters."""
    heads = slice(copy.kv_heads.start - first_head, copy.kv_heads.stop - first_head)
    for values, layer in zip(staged, copy.layers, strict=True):
        cache.runs(layer)[:, heads].index_copy_(2, slots.to(cache.device), values)
