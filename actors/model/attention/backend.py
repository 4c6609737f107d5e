"""The attention seam: what a decoder asks of a kernel.

A backend plans once a step (`prepare`) and runs once a layer (`attend`). Queries are aligned to the end of their
sequence: a query at position p sees positions ``[max(0, p - window + 1), p]``, whatever the chunking.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from actors.model.attention.params import AttentionParams
from actors.model.kv.kv_cache import KVCache
from actors.model.step.batch import Batch


class AttentionBackend(Protocol):
    """A kernel family behind one interface. Stateless: everything about a step is in its metadata.

    A cache is that of the layers of one kind; a step has a plan for each kind.
    """

    name: str

    def prepare(self, batch: Batch, cache: KVCache) -> Any:
        """The plan of a step, shared by all its layers; only this backend reads it."""

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

        Returns [tokens, q_heads, dim of v], which may be less. `params` are the layer's own, the same in every step.
        """


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention `out` [..., dim] with log-sum-exp `lse` [...] over all keys, had each head a further key of score `sinks`
    and value 0. In out's dtype.

    The sink adds ``exp(sink)`` to the denominator: ``out * exp(lse) / (exp(lse) + exp(sink))``, which is
    ``out * sigmoid(lse - sink)``. To be done once, after partial outputs are merged.
    """
    return (out * (lse - sinks).sigmoid().unsqueeze(-1)).to(out.dtype)
