"""The KV cache of one rank: fixed-size pages (blocks) of keys and values, head-major.

One tensor per layer, ``[2 (K, V), kv_heads, num_blocks, block_size, head_dim]``::

    K  head 0   | block 0 | block 1 | block 2 | ...      <- consecutive blocks of one head are one run of memory:
       head 1   | block 0 | block 1 | block 2 | ...         they are read without a copy, and a head that moves to
    V  head 0   | block 0 | block 1 | block 2 | ...         another rank is one slice
       head 1   | ...

Latent attention (`placement.mla_spec`) has one plane in the place of the two: what it reads as keys and as values is the
same latents, which it calls one KV head::

    latents     | block 0 | block 1 | block 2 | ...      [1, 1, num_blocks, block_size, latent_dim]

Pages start as zeros, not as whatever memory held: attention reads the unused end of a page with weight 0, and
``0 * NaN`` is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from placement.model_spec import ModelSpec
from placement.shards import Shard


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
        planes: int = 2,
    ) -> None:
        self.layers = layers
        self.kv_heads = kv_heads
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.head_dim = head_dim
        self.planes = planes
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (planes, kv_heads, num_blocks, block_size, head_dim)
        self._layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        # Made once: on CPU a view costs about as much as reading a short page.
        self._runs = [pages.view(planes, kv_heads, num_blocks * block_size, head_dim) for pages in self._layers]
        self._rows = [pages.view(planes * kv_heads * num_blocks, block_size * head_dim) for pages in self._layers]

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        own: Shard,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """The pages of the rank that holds `own`."""
        sizes = (own.layers, len(own.kv_heads), num_blocks, block_size, spec.kv_dim)
        return cls(*sizes, dtype, device, spec.kv_planes)

    @property
    def nbytes(self) -> int:
        """Memory of all pages, in bytes."""
        return sum(pages.nbytes for pages in self._layers)

    def pages(self, layer: int) -> Tensor:
        """K and V of a layer: [planes, kv_heads, num_blocks, block_size, head_dim], contiguous."""
        return self._layers[layer - self.layers.start]

    def keys(self, layer: int) -> Tensor:
        """[kv_heads, num_blocks, block_size, head_dim], contiguous; every head a contiguous slice."""
        return self.pages(layer)[0]

    def values(self, layer: int) -> Tensor:
        """As `keys`."""
        return self.pages(layer)[-1]

    def runs(self, layer: int) -> Tensor:
        """[planes, kv_heads, num_blocks * block_size, head_dim]: pages end to end, indexed by slot."""
        return self._runs[layer - self.layers.start]

    def flat_pages(self, layer: int) -> Tensor:
        """[planes * kv_heads * num_blocks, block_size * head_dim]: one row a page, for a flat index (see `page_rows`)."""
        return self._rows[layer - self.layers.start]

    def page_rows(self, block_tables: Tensor) -> Tensor:
        """Rows of `flat_pages` that hold the blocks [rows, blocks] of every head: [planes * rows * kv_heads * blocks]."""
        firsts = torch.arange(self.planes * self.kv_heads, device=block_tables.device) * self.num_blocks
        return (firsts.view(self.planes, 1, self.kv_heads, 1) + block_tables[None, :, None, :]).reshape(-1)

    def paged_views(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V as flash-attention kernels take them: [num_blocks, block_size, kv_heads, head_dim], strided views."""
        return self.keys(layer).permute(1, 2, 0, 3), self.values(layer).permute(1, 2, 0, 3)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store `k` and `v` [tokens, kv_heads, head_dim] at `slots` [tokens] (slot = block * block_size + offset).

        A cache of latents takes them as `k`, and has no place for `v`.
        """
        for plane, x in zip(self.runs(layer), (k, v), strict=False):
            plane.index_copy_(1, slots, x.transpose(0, 1))
