"""Context-parallel latent attention (MLA): the latents of a sequence lie on several ranks (`actors.model.attention.context`).

Latents are exchanged, not heads. A rank's own queries attend to fresh latents in the form that is cheaper for their row. Cached
latents are attended to in absorbed form, because they also meet queries of heads whose matrices are on other ranks (DCP).
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
    """The context-parallel `LatentBackend` of one rank."""

    def __init__(self, context: ContextAttention) -> None:
        self.name = f"latent, {context.name}"
        self._context = context

    def prepare(self, batch: Batch, cache: KVCache) -> ContextPlan:
        """See `LatentBackend.prepare`."""
        return self._context.prepare(batch, cache)

    def attend(
        self, q: Tensor, latents: Tensor, heads: LatentHeads, cache: KVCache, plan: ContextPlan, params: AttentionParams
    ) -> Tensor:
        """See `LatentBackend.attend`."""
        naive, absorbed = Naive(heads), Absorbed(heads)

        def fresh(row: LocalRow) -> AttentionForm:
            return absorbed if _absorbs(heads, row) else naive

        inputs = AttentionInputs(q, latents[:, None], fresh, absorbed, heads.mla.value_dim)
        return self._context.attend_inputs(inputs, cache, plan, params)


def _absorbs(heads: LatentHeads, row: LocalRow) -> bool:
    """Whether the absorbed form is cheaper for a row's own queries over its fresh keys, both local and received."""
    queries = sum(map(len, row.spans))
    pairs = sum(len(span) * (span.start - row.start) + len(span) * (len(span) + 1) // 2 for span in row.spans)
    return heads.mla.absorbs(queries, row.count, pairs)
