"""The kernel seam of context parallelism: attention that also says how much weight it saw.

`actors.model.attention.backend` asks for whole answers; ranks that see only some of the keys need the log-sum-exp with theirs,
to be merged. Two calls are enough: a block of queries over keys at hand, and decode rows over pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from actors.model.attention.decode_row import DecodeRow
from actors.model.attention.params import AttentionParams
from actors.model.kv.kv_cache import KVCache


class PagedTask(Protocol):
    """Decode rows that one kernel call answers."""

    @property
    def rows(self) -> slice | Tensor: ...

    def run_with_lse(self, q: Tensor, cache: KVCache, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """From `q` [rows, q_heads, dim]: output [rows, q_heads, dim] and LSE [rows, q_heads] fp32."""


class PartialKernel(Protocol):
    """What a device's kernels can do. LSE is a natural logarithm, with the scale in it, and -inf where nothing was seen."""

    name: str

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        params: AttentionParams,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`q` [1, q_heads, queries, dim] over `k`, `v` [1, kv_heads, keys, dim]: output like q, LSE [1, q_heads, queries].

        Of `params` the scale and the cap count; windows come as masks, and sinks after the last merge."""

    def decode(self, rows: Sequence[DecodeRow], cache: KVCache) -> Sequence[PagedTask]:
        """Tasks that together hold every row once; each row sees at least one key."""
