"""The kernel seam of context parallelism: attention that also says how much weight it saw.

`actors.model.attention.backend` asks for whole answers; ranks that see only some of the keys need the log-sum-exp with theirs,
to be merged. Two calls are enough: a block of queries over keys at hand, and decode rows over pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from actors.model.attention.cpu.decode import DecodeRow, bucketed
from actors.model.attention.cpu.flash import flash_with_lse
from actors.model.kv.kv_cache import KVCache


class PagedTask(Protocol):
    """Decode rows that one kernel call answers."""

    @property
    def rows(self) -> slice | Tensor: ...

    def run_with_lse(self, q: Tensor, cache: KVCache, layer: int, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
        """From `q` [rows, q_heads, dim]: output [rows, q_heads, dim] and LSE [rows, q_heads] fp32."""


class PartialKernel(Protocol):
    """What a device's kernels can do. LSE is a natural logarithm, with the scale in it, and -inf where nothing was seen."""

    name: str

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`q` [1, q_heads, queries, dim] over `k`, `v` [1, kv_heads, keys, dim]: output like q, LSE [1, q_heads, queries]."""

    def decode(self, rows: Sequence[DecodeRow], cache: KVCache) -> Sequence[PagedTask]:
        """Tasks that together hold every row once; each row sees at least one key."""


class CpuPartial:
    """torch's flash operator, and buckets of gathered pages."""

    name = "torch flash (CPU)"

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return flash_with_lse(q, k, v, scale, causal=causal, mask=mask, softcap=softcap)

    def decode(self, rows: Sequence[DecodeRow], cache: KVCache) -> Sequence[PagedTask]:
        return bucketed(rows, cache)


def choose_partial(device: torch.device | str, dtype: torch.dtype, block_size: int, softcap: bool = False) -> PartialKernel:
    """The kernels of a device; `softcap`: which can cap scores."""
    if torch.device(device).type == "cuda":
        from actors.model.attention.cuda.partial_kernels import choose_cuda_partial

        return choose_cuda_partial(dtype, block_size, softcap=softcap)
    kernel: PartialKernel = CpuPartial()
    return kernel
