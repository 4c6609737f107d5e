"""Partial attention (output and log-sum-exp) on CPU, with torch's flash-attention operator."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actors.model.attention.cpu.decode import decode_tasks
from actors.model.attention.cpu.flash import flash_with_lse
from actors.model.attention.decode_row import DecodeRow
from actors.model.attention.params import AttentionParams
from actors.model.attention.partial import PagedTask
from actors.model.kv.kv_cache import KVCache


class CpuPartial:
    """The CPU `PartialKernel`: torch's flash-attention operator, and a compiled kernel or buckets of gathered pages for decode
    rows."""

    name = "torch flash (CPU)"

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        params: AttentionParams,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `PartialKernel.dense`."""
        return flash_with_lse(q, k, v, params.scale, causal=causal, mask=mask, softcap=params.softcap)

    def decode(self, rows: Sequence[DecodeRow], cache: KVCache) -> Sequence[PagedTask]:
        """See `PartialKernel.decode`."""
        return decode_tasks(rows, cache)
