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
        """Return this backend's plan of the step `batch` (slots, block tables, lengths), which is passed to `attend` in every
        layer of `cache`, the pages of one attention kind. Only this backend reads it."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        plan: Any,
        params: AttentionParams,
    ) -> Tensor:
        """Write `k` and `v` [tokens, kv_heads, dim] to the cache at the slots of `plan`, then attend causally from `q` [tokens,
        q_heads, dim of k].

        Returns [tokens, q_heads, dim of v]; v may have fewer dimensions than k. `plan` is what `prepare` returned for this step
        and `cache`; `params` are the constants of the layer. Under context parallelism it is a collective of the cp and dcp
        groups.
        """


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the output of attention with attention sinks: in the dtype of `out`, as if each head had one more key, with its
    sink as score and the value 0.

    `out` [..., dim] and its log-sum-exp `lse` [...] cover all keys; `sinks`, one score a head, broadcasts to `lse`. The sink
    adds ``exp(sink)`` to the denominator: ``out * exp(lse) / (exp(lse) + exp(sink))``, which is ``out * sigmoid(lse - sink)``.
    Call it once, after partial outputs have been merged.
    """
    return (out * (lse - sinks).sigmoid().unsqueeze(-1)).to(out.dtype)
