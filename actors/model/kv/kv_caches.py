"""The KV caches of one rank: a `KVCache` for each attention kind in its stage (`placement.model.attention_kind`).

All of them share one block table: block 7 of a sequence is page 7 in every layer, whatever a page of that layer contains::

    layers with full attention          | page 0 | page 1 | ...     2 KV heads a page
    layers with a window                | page 0 | page 1 | ...     4 KV heads a page
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from actors.model.kv.kv_cache import KVCache
from placement.model.spec import ModelSpec
from placement.ownership.shard import Shard


class KVCaches:
    """The caches by kind (an index of `ModelSpec.kinds`), all with the same number of blocks."""

    def __init__(self, parts: Mapping[int, KVCache]) -> None:
        self.parts = parts
        first = next(iter(parts.values()))
        self.num_blocks, self.block_size, self.device = first.num_blocks, first.block_size, first.device

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        own: Shard,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KVCaches:
        """Return newly allocated caches, zeros, of the rank that holds `own`, one for each attention kind in its stage:
        `num_blocks` blocks of `block_size` tokens each."""
        kinds = dict.fromkeys(spec.kind_of(layer) for layer in own.layers)
        return cls({kind: KVCache.of(spec, own, num_blocks, block_size, dtype, device, kind) for kind in kinds})

    @property
    def nbytes(self) -> int:
        """Memory of the pages of all kinds, in bytes."""
        return sum(part.nbytes for part in self.parts.values())
