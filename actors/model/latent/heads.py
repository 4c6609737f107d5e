"""The up-projection of latents to the keys and values of this rank's heads, and its absorption into queries and outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actors.model.kernels.linear import linear, linear_by_head
from placement.model.mla_spec import MLASpec


class LatentHeads(nn.Module):
    """This rank's rows of ``kv_b``: for each head ``nope_dim`` rows that make its key, then ``value_dim`` rows that make its
    value.

    A latent is ``[normed latent: kv_lora_rank | rotated shared key: rope_dim]``, a query ``[nope_dim | rope_dim]``.
    """

    def __init__(self, weight: nn.Parameter, mla: MLASpec) -> None:
        super().__init__()
        self.weight, self.mla = weight, mla
        self.num_heads = weight.shape[0] // (mla.nope_dim + mla.value_dim)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of this rank's heads for `latents` [tokens, latent_dim], each [1, heads, tokens,
        query_dim].

        Values are padded with zeros after their value_dim, because kernels need keys and values of one size.
        """
        mla = self.mla
        made = linear(latents[:, : mla.kv_lora_rank], self.weight)
        made = made.view(len(latents), self.num_heads, mla.nope_dim + mla.value_dim)
        shared = latents[:, None, mla.kv_lora_rank :].expand(-1, self.num_heads, -1)
        keys = torch.cat((made[..., : mla.nope_dim], shared), -1)
        values = F.pad(made[..., mla.nope_dim :], (0, mla.query_dim - mla.value_dim))
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)

    def absorb(self, q: Tensor) -> Tensor:
        """Return queries as long as a latent, [tokens, heads, latent_dim], from `q` [tokens, heads, query_dim].

        Their products with latents equal the products of `q` with the expanded keys.
        """
        nope, rope = q[..., : self.mla.nope_dim], q[..., self.mla.nope_dim :]
        longer = linear_by_head(nope.transpose(0, 1), self._by_head()[:, : self.mla.nope_dim]).transpose(0, 1)
        return torch.cat((longer, rope), -1)

    def lift(self, sums: Tensor) -> Tensor:
        """Return sums of values [heads, tokens, value_dim] from weighted `sums` of latents without shared key [heads, tokens,
        kv_lora_rank]."""
        return linear_by_head(sums, self._by_head()[:, self.mla.nope_dim :].mT)

    def _by_head(self) -> Tensor:
        """Return the weight as [heads, nope_dim + value_dim, kv_lora_rank]."""
        return self.weight.view(self.num_heads, self.mla.nope_dim + self.mla.value_dim, self.mla.kv_lora_rank)
