"""The interface of an attention backend: the paged attention kernels that a decoder calls.

A backend plans once a step (`prepare`) and runs once a layer (`attend`). Queries are aligned to the end of their sequence: a
query at position p sees the positions ``[max(0, p - window + 1), p]``, however the prompt is cut into chunks (chunked prefill).
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from actors.model.attention.params import AttentionParams
from actors.model.kv.kv_cache import KVCache
from actors.model.step.batch import Batch


class AttentionBackend(Protocol):
    """One family of attention kernels. A backend is stateless: everything about a step is in the plan that `prepare` returns.

    A cache holds the layers of one attention kind, so a step has one plan for each kind.
    """

    name: str

    def prepare(self, batch: Batch, cache: KVCache) -> Any:
        """Return the plan of a step, which all layers of the cache share. Only this backend reads it."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        plan: Any,
        params: AttentionParams,
    ) -> Tensor:
        """Write `k` and `v` [tokens, kv_heads, dim] to the cache, then attend from `q` [tokens, q_heads, dim of k].

        Returns [tokens, q_heads, dim of v]; v may have fewer dimensions than k. `params` are the constants of the layer.
        """


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Add attention sinks to the output of attention.

    `out` [..., dim] and its log-sum-exp `lse` [...] cover all keys; `sinks` is one score a head. Returns, in the dtype of
    `out`, the output as if each head had one more key, with this score and the value 0. The sink adds ``exp(sink)`` to the
    denominator: ``out * exp(lse) / (exp(lse) + exp(sink))``, which is ``out * sigmoid(lse - sink)``. Call it once, after
    partial outputs have been merged.
    """
    return (out * (lse - sinks).sigmoid().unsqueeze(-1)).to(out.dtype)
