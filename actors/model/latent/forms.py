"""The two forms of latent attention (`actors.model.attention.context.forms`). A cached token is [1, latent_dim]."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from actors.model.latent.heads import LatentHeads


@dataclass(frozen=True)
class Naive:
    """The naive form: latents are expanded into the keys and values of every head."""

    heads: LatentHeads

    @property
    def partial_dim(self) -> int:
        """See `AttentionForm.partial_dim`: the number of dimensions of a value head."""
        return self.heads.mla.value_dim

    def queries(self, q: Tensor) -> Tensor:
        """See `AttentionForm.queries`."""
        return q

    def keys_values(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """See `AttentionForm.keys_values`. Each head gets its own keys and values."""
        return self.heads.expand(kv[:, 0])

    def partial_outputs(self, out: Tensor) -> Tensor:
        """See `AttentionForm.partial_outputs`."""
        return out[..., : self.partial_dim]

    def outputs(self, partial_outputs: Tensor) -> Tensor:
        """See `AttentionForm.outputs`."""
        return partial_outputs


@dataclass(frozen=True)
class Absorbed:
    """The absorbed form: all heads read the latents themselves, both as keys and as values (without the shared key's part)."""

    heads: LatentHeads

    @property
    def partial_dim(self) -> int:
        """See `AttentionForm.partial_dim`. The size of a weighted sum of latents, without the shared key."""
        return self.heads.mla.kv_lora_rank

    def queries(self, q: Tensor) -> Tensor:
        """See `AttentionForm.queries`."""
        return self.heads.absorb(q)

    def keys_values(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """See `AttentionForm.keys_values`. Both are the latents, one head for all."""
        latents = kv.transpose(0, 1).unsqueeze(0)
        return latents, latents

    def partial_outputs(self, out: Tensor) -> Tensor:
        """See `AttentionForm.partial_outputs`."""
        return out[..., : self.partial_dim]

    def outputs(self, partial_outputs: Tensor) -> Tensor:
        """See `AttentionForm.outputs`."""
        return self.heads.lift(partial_outputs)
