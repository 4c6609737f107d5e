"""The kernel interface of context parallelism: attention that also returns its log-sum-exp (LSE).

`actors.model.attention.backend` returns complete outputs. Ranks that see only some of the keys need the log-sum-exp as well, so
that partial outputs can be merged. Two calls are enough: a block of queries over local keys, and decode rows over pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from actors.model.attention.decode_row import DecodeRow
from actors.model.attention.params import AttentionParams
from actors.model.kv.kv_cache import KVCache


class PagedTask(Protocol):
    """Decode rows that are computed by one kernel call."""

    @property
    def rows(self) -> slice | Tensor:
        """The tokens of this call's queries (`DecodeRow.token`): a slice if they are consecutive, else their indices."""
        ...

    def run_with_lse(self, q: Tensor, cache: KVCache, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """Attend from `q` [rows, q_heads, dim] to the cached keys of these rows, in the layer of `params`. Returns the output
        [rows, q_heads, dim of values] and LSE [rows, q_heads] fp32."""


class PartialKernel(Protocol):
    """The partial attention kernels of a device. LSE is a natural logarithm, includes the scale, and is -inf if no key was
    seen."""

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
        """Attend from `q` [1, q_heads, queries, dim] to `k`, `v` [1, kv_heads, keys, dim]; with `causal`, query i sees the keys
        up to i. `mask` [1, 1, queries, keys] fp32 is added to the scores.

        Returns the output, like `q`, and LSE [1, q_heads, queries] fp32. Only the scale and the cap of `params` are used: the
        caller passes windows as masks, and applies sinks after the last merge.
        """

    def decode(self, rows: Sequence[DecodeRow], cache: KVCache) -> Sequence[PagedTask]:
        """Return kernel calls that together cover every one of `rows` once, over the pages of `cache`. They serve all layers of
        the step. Each row must see at least one key."""
