"""The interface of a latent attention (MLA) backend: the counterpart of `actors.model.attention.backend` for latents."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from actors.model.attention.params import AttentionParams
from actors.model.kv.kv_cache import KVCache
from actors.model.latent.heads import LatentHeads
from actors.model.step.batch import Batch


class LatentBackend(Protocol):
    """Plans once a step and runs once a layer, as an `AttentionBackend` does. A query sees every position up to its own."""

    name: str

    def prepare(self, batch: Batch, cache: KVCache) -> Any:
        """Return this backend's plan of the step `batch`, which is passed to `attend` in every layer. Only this backend reads
        it."""

    def attend(
        self, q: Tensor, latents: Tensor, heads: LatentHeads, cache: KVCache, plan: Any, params: AttentionParams
    ) -> Tensor:
        """Write `latents` [tokens, latent_dim] to the cache at the slots of `plan`, then attend causally from `q` [tokens,
        heads, query_dim]; `heads` expands latents to this rank's heads.

        Returns [tokens, heads, value_dim]. `plan` is what `prepare` returned for this step. Models with latents have no
        windows, caps or sinks, so only the layer and the scale of `params` are used.
        """
