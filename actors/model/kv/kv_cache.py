"""The paged KV cache of the layers of one attention kind on one rank: fixed-size pages (blocks), head-major.

A rank has one for each attention kind in its stage (`actors.model.kv.kv_caches`). One tensor per layer, ``[2 (K, V), kv_heads,
num_blocks, block_size, head_dim]``::

    K  head 0   | block 0 | block 1 | block 2 | ...      <- consecutive blocks of one head are contiguous in memory:
       head 1   | block 0 | block 1 | block 2 | ...         they are read without a copy, and a head that moves to
    V  head 0   | block 0 | block 1 | block 2 | ...         another rank is one slice
       head 1   | ...

If values differ in size from keys, they have a tensor of their own. Latent attention (`placement.model.mla_spec`) has one plane
instead of two: it reads the same latents as keys and as values, and treats them as one KV head::

    latents     | block 0 | block 1 | block 2 | ...      [1, 1, num_blocks, block_size, latent_dim]

Pages are initialised to zero rather than left uninitialised: attention reads the unused end of a page with weight 0, and ``0 *
NaN`` is NaN. On CPU the zeros come from the operating system, which commits memory only as pages are written.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from actors.model.kernels.native.library import library
from placement.model.spec import ModelSpec
from placement.ownership.shard import Shard


class _Pages(NamedTuple):
    """The pages of one layer, in three views."""

    stores: tuple[Tensor, ...]
    """Tensors [planes, kv_heads, num_blocks, block_size, dim]: one if keys and values have the same size, else one for each."""
    runs: tuple[Tensor, ...]
    """One view for each plane: [kv_heads, num_blocks * block_size, dim]."""
    rows: tuple[Tensor, ...]
    """One view for each store: [planes * kv_heads * num_blocks, block_size * dim]."""

    @classmethod
    def of(cls, stores: Sequence[Tensor]) -> _Pages:
        """Return the views of the tensors `stores` of one layer, [planes, kv_heads, num_blocks, block_size, dim] each."""
        runs = (plane.flatten(1, 2) for store in stores for plane in store)
        return cls(tuple(stores), tuple(runs), tuple(store.flatten(3).flatten(0, 2) for store in stores))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros of `shape`. `torch.zeros` writes to all of them, which on CPU commits a GiB that may never be used."""
    nbytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class KVCache:
    """Pages for some layers of one stage and the KV heads of one tp rank.

    `layers` are numbered as in the whole model; `kind` is their attention kind, an index of `ModelSpec.kinds`.
    """

    def __init__(
        self,
        layers: Sequence[int],
        kv_heads: int,
        num_blocks: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        planes: int = 2,
        value_dim: int | None = None,
        kind: int = 0,
    ) -> None:
        """Allocate the pages. `head_dim` is the size of keys; `value_dim` is that of values, by default `head_dim`."""
        self.layers = layers
        self.kv_heads = kv_heads
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.head_dim = head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.planes = planes
        self.kind = kind
        self.dtype = dtype
        self.device = torch.device(device)
        self.stores = ((planes, head_dim),) if self.value_dim == head_dim else ((1, head_dim), (1, self.value_dim))
        """(planes, dimension) of each tensor of a layer. All tensors have the same number of planes."""
        shapes = [(planes, kv_heads, num_blocks, block_size, dim) for planes, dim in self.stores]
        self._scratch = [torch.empty(0, block_size * dim, dtype=dtype, device=device) for _, dim in self.stores]
        # Views are made once: on CPU, making one costs about as much as reading a short page.
        self._layers = {layer: _Pages.of([_zeros(shape, dtype, self.device) for shape in shapes]) for layer in layers}

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        own: Shard,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        index: int = 0,
    ) -> KVCache:
        """Return newly allocated pages, zeros, of the rank that holds `own`, for its layers of the attention kind `index` of
        ``spec.kinds``: `num_blocks` blocks of `block_size` tokens."""
        kind, kv_heads = spec.kinds[index], own.heads[index][1]
        layers = [layer for layer in own.layers if spec.kind_of(layer) == index]
        sizes = (layers, len(kv_heads), num_blocks, block_size, kind.key_dim)
        return cls(*sizes, dtype, device, kind.planes, kind.value_dim, index)

    @property
    def nbytes(self) -> int:
        """Memory of the pages of all layers of this cache, in bytes."""
        return sum(store.nbytes for pages in self._layers.values() for store in pages.stores)

    @property
    def parts(self) -> Mapping[int, KVCache]:
        """This cache by its attention kind, in the form of `KVCaches.parts`."""
        return {self.kind: self}

    def pages(self, layer: int) -> Tensor:
        """Return K and V of a layer: [planes, kv_heads, num_blocks, block_size, head_dim], contiguous; no copy.

        Raises `ValueError` if they differ in size: `keys` and `values` are then two tensors. `KeyError` if the cache lacks the
        layer.
        """
        if len(self.stores) > 1:
            raise ValueError(
                f"keys of size {self.head_dim} and values of size {self.value_dim} are two tensors: use keys() and values()"
            )
        return self._layers[layer].stores[0]

    def keys(self, layer: int) -> Tensor:
        """Return the keys of a layer (numbered in the whole model), [kv_heads, num_blocks, block_size, head_dim], contiguous;
        so is every head. No copy."""
        return self._layers[layer].stores[0][0]

    def values(self, layer: int) -> Tensor:
        """Return the values of a layer (numbered in the whole model), [kv_heads, num_blocks, block_size, value_dim],
        contiguous; so is every head. No copy. For latents these are the keys."""
        return self._layers[layer].stores[-1][-1]

    def runs(self, layer: int) -> Tensor:
        """Return K and V of a layer by slot (block * block_size + offset), [planes, kv_heads, num_blocks * block_size,
        head_dim]; no copy. Raises `ValueError` if they differ in size."""
        return self.pages(layer).flatten(2, 3)

    def plane_runs(self, layer: int) -> tuple[Tensor, ...]:
        """Return K and V of a layer by slot (block * block_size + offset) as separate tensors, each [kv_heads, num_blocks *
        block_size, its dim]; one tensor for latents. No copy."""
        return self._layers[layer].runs

    def flat_pages(self, layer: int) -> tuple[Tensor, ...]:
        """Return each tensor of a layer (as in `stores`) with one page of one head a row, [planes * kv_heads * num_blocks,
        block_size * dim]; no copy. `page_rows` finds rows."""
        return self._layers[layer].rows

    def scratch(self, rows: int) -> list[Tensor]:
        """Return a buffer for `rows` rows of each tensor of `flat_pages`, [rows, block_size * dim], with undefined content. All
        callers share the memory, which grows to the largest request."""
        for at, (buffer, (_, dim)) in enumerate(zip(self._scratch, self.stores, strict=True)):
            if len(buffer) < rows:
                self._scratch[at] = torch.empty(rows, self.block_size * dim, dtype=self.dtype, device=self.device)
        return [buffer[:rows] for buffer in self._scratch]

    def page_rows(self, block_tables: Tensor) -> Tensor:
        """Return the rows of `flat_pages` that hold `block_tables` [sequences, blocks] for every plane and head: int64 [planes
        * sequences * kv_heads * blocks], in this order."""
        planes = self.stores[0][0]
        firsts = torch.arange(planes * self.kv_heads, device=block_tables.device) * self.num_blocks
        return (firsts.view(planes, 1, self.kv_heads, 1) + block_tables[None, :, None, :]).reshape(-1)

    def paged_views(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return K and V of a layer in the layout of flash-attention kernels: [num_blocks, block_size, kv_heads, dim], strided
        views."""
        return self.keys(layer).permute(1, 2, 0, 3), self.values(layer).permute(1, 2, 0, 3)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store `k` and `v` [tokens, kv_heads, dim of each] in the layer `layer` at `slots` [tokens] int64 (slot = block *
        block_size + offset).

        A cache of latents stores `k` and ignores `v`.
        """
        native = library(k)
        for plane, x in zip(self.plane_runs(layer), (k, v), strict=False):
            if native is not None:
                native.write_plane(x, slots, plane)
            else:
                plane.index_copy_(1, slots, x.transpose(0, 1))

    def write_kv(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Store `kv` [tokens, kv_heads, ...], keys and values in the form that `joined` returns, in the layer `layer` at
        `slots` [tokens] int64."""
        self.write(layer, slots, kv[..., : self.head_dim], kv[..., -self.value_dim :])

    def joined(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return keys and values, each [..., its dim], as one tensor [..., key and value]. For latents, return the keys: they
        are both."""
        return keys if self.planes == 1 else torch.cat((keys, values), -1)
