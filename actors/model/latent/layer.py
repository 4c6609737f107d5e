"""The attention layer of a model with latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1).

    x ──qkv_a──→ queries ([ q_a ] ─norm─ q_b → queries) ───────→ [nope | rope] ─rotated──→ ┐
            └──→ latent ──────────────────────norm─────────────→ ┐                         ├ backend ──→ o ──sum──→ y
            └──→ shared key ──────────────────────────rotated──→ ┴ one latent a token ───→ ┘
                                                                                 (cached)

The cache stores the normed latent and the rotated shared key, so that cached latents need neither again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from actors.model.attention.params import AttentionParams
from actors.model.kernels.linear import linear
from actors.model.latent.backend import LatentBackend
from actors.model.latent.heads import LatentHeads
from actors.model.layers.layers import ColumnParallel, RMSNorm, RowParallel
from actors.model.step.step import Step


class LatentAttention(nn.Module):
    """Latent attention over this rank's heads, with queries projected directly from the hidden states."""

    def __init__(
        self,
        params: AttentionParams,
        rope: int,
        backend: LatentBackend,
        qkv_a: ColumnParallel,
        kv_a_norm: RMSNorm,
        kv_b: LatentHeads,
        o: RowParallel,
    ) -> None:
        super().__init__()
        self.qkv_a, self.kv_a_norm, self.kv_b, self.o = qkv_a, kv_a_norm, kv_b, o
        self.params, self._rope, self._backend = params, rope, backend

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Return the attention output of the hidden states `x`, and write the step's latents to the cache of `step`. `x` and
        the result are this rank's part of [tokens, hidden] (`Region`). A collective of the tp group."""
        mla = self.kv_b.mla
        first = self.qkv_a(x, step.region)
        queries, latent, shared = first.tensor_split((-mla.latent_dim, -mla.rope_dim), -1)
        q = self._queries(queries).view(len(first), self.kv_b.num_heads, mla.query_dim)
        rotated = step.rotations[self._rope](torch.cat((q[..., mla.nope_dim :], shared.unsqueeze(1)), 1))
        q = torch.cat((q[..., : mla.nope_dim], rotated[:, :-1]), -1)
        latents = torch.cat((self.kv_a_norm(latent), rotated[:, -1]), -1)
        paged = step.paged[0]  # models with latent attention have only one attention kind
        out = self._backend.attend(q, latents, self.kv_b, paged.cache, paged.plan, self.params)
        return self.o(out.flatten(1), step.region)  # type: ignore[no-any-return]

    def _queries(self, first: Tensor) -> Tensor:
        """Convert the query part of the first projection to the queries of own heads [tokens, heads * query_dim]."""
        return first


class LowRankLatentAttention(LatentAttention):
    """`LatentAttention` whose queries also go through a latent, which every rank holds in full."""

    def __init__(self, *parts: Any, q_a_norm: RMSNorm, q_b: ColumnParallel) -> None:
        super().__init__(*parts)
        self.q_a_norm, self.q_b = q_a_norm, q_b

    def _queries(self, first: Tensor) -> Tensor:
        return linear(self.q_a_norm(first), self.q_b.weight)
