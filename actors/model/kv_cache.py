"""The KV cache of one rank: fixed-size pages (blocks) of keys and values, head-major.

One tensor per layer, ``[2 (K, V), kv_heads, num_blocks, block_size, head_dim]``::

    K  head 0   | block 0 | block 1 | block 2 | ...      <- consecutive blocks of one head are one run of memory:
       head 1   | block 0 | block 1 | block 2 | ...         they are read without a copy, and a head that moves to
    V  head 0   | block 0 | block 1 | block 2 | ...         another rank is one slice
       head 1   | ...

Pages start as zeros, not as whatever memory held: attention reads the unused end of a page with weight 0, and
``0 * NaN`` is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Pages for the layers of one stage and the KV heads of one tp rank. `layers` are numbered as in the whole model."""

    def __init__(
        self,
        layers: range,
        kv_heads: int,
        num_blocks: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = layers
        self.kv_heads = kv_heads
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (2, kv_heads, num_blocks, block_size, head_dim)
        self._layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        # Made once: on CPU a view costs about as much as reading a short page.
        self._runs = [pages.view(2, kv_heads, num_blocks * block_size, head_dim) for pages in self._layers]
        self._rows = [pages.view(2 * kv_heads * num_blocks, block_size * head_dim) for pages in self._layers]

    @property
    def nbytes(self) -> int:
        """Memory of all pages, in bytes."""
        return sum(pages.nbytes for pages in self._layers)

    def pages(self, layer: int) -> Tensor:
        """K and V of a layer: [2, kv_heads, num_blocks, block_size, head_dim], contiguous."""
        return self._layers[layer - self.layers.start]

    def keys(self, layer: int) -> Tensor:
        """[kv_heads, num_blocks, block_size, head_dim], contiguous; every head a contiguous slice."""
        return self.pages(layer)[0]

    def values(self, layer: int) -> Tensor:
        """As `keys`."""
        return self.pages(layer)[1]

    def runs(self, layer: int) -> Tensor:
        """[2, kv_heads, num_blocks * block_size, head_dim]: pages end to end, indexed by slot."""
        return self._runs[layer - self.layers.start]

    def flat_pages(self, layer: int) -> Tensor:
        """[2 * kv_heads * num_blocks, block_size * head_dim]: one row a page, to gather with a flat index (see `page_rows`)."""
        return self._rows[layer - self.layers.start]

    def page_rows(self, block_tables: Tensor) -> Tensor:
        """Rows of `flat_pages` that hold the blocks [rows, blocks] of every head: [2 * rows * kv_heads * blocks]."""
        planes = torch.arange(2 * self.kv_heads, device=block_tables.device) * self.num_blocks
        return (planes.view(2, 1, self.kv_heads, 1) + block_tables[None, :, None, :]).reshape(-1)

    def paged_views(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V as flash-attention kernels take them: [num_blocks, block_size, kv_heads, head_dim], strided views."""
        return self.keys(layer).permute(1, 2, 0, 3), self.values(layer).permute(1, 2, 0, 3)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store `k` and `v` [tokens, kv_heads, head_dim] at `slots` [tokens] (slot = block * block_size + offset)."""
        keys, values = self.runs(layer)
        keys.index_copy_(1, slots, k.transpose(0, 1))
        values.index_copy_(1, slots, v.transpose(0, 1))
