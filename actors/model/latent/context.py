"""Latent attention where the latents of a sequence lie on several ranks: `actors.model.attention.context.backend`, for latents.

What is exchanged is latents, not heads. Own queries attend to fresh latents in the form that is cheaper for their row; cached
latents are attended to absorbed, for queries of heads whose matrices are elsewhere come to them as well (dcp).
"""

from __future__ import annotations

from torch import Tensor

from actors.model.attention.context.backend import ContextAttention
from actors.model.attention.context.forms import AttentionForm, AttentionInputs
from actors.model.attention.context.local_rows import LocalRow
from actors.model.attention.context.plan import ContextPlan
from actors.model.attention.params import AttentionParams
from actors.model.kv.kv_cache import KVCache
from actors.model.latent.forms import Absorbed, Naive
from actors.model.latent.heads import LatentHeads
from actors.model.step.batch import Batch


class ContextLatent:
    """The `LatentBackend` of one rank."""

    def __init__(self, context: ContextAttention) -> None:
        self.name = f"latent, {context.name}"
        self._context = context

    def prepare(self, batch: Batch, cache: KVCache) -> ContextPlan:
        return self._context.prepare(batch, cache)

    def attend(
        self, q: Tensor, latents: Tensor, heads: LatentHeads, cache: KVCache, plan: ContextPlan, params: AttentionParams
    ) -> Tensor:
        naive, absorbed = Naive(heads), Absorbed(heads)

        def fresh(row: LocalRow) -> AttentionForm:
            return absorbed if _absorbs(heads, row) else naive

        inputs = AttentionInputs(q, latents[:, None], fresh, absorbed, heads.mla.value_dim)
        return self._context.attend_inputs(inputs, cache, plan, params)


def _absorbs(heads: LatentHeads, row: LocalRow) -> bool:
    """Whether own queries of a row attend to its fresh keys, own and others', at less cost absorbed."""
    queries = sum(map(len, row.spans))
    pairs = sum(len(span) * (span.start - row.start) + len(span) * (len(span) + 1) // 2 for span in row.spans)
    return heads.mla.absorbs(queries, row.count, pairs)
