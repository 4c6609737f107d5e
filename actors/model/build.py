"""Builds the modules of a decoder from the parameters of the shard table."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from actors.groups.group import Group
from actors.model.attention.params import AttentionParams
from actors.model.latent.build import latent_attention
from actors.model.layers.layer import GroupedAttention, Layer, NormedAttention, ScaledValueAttention, WidthNormedAttention
from actors.model.layers.layers import (
    ACTIVATIONS,
    CappedHead,
    ColumnParallel,
    GatedMLP,
    OffsetRMSNorm,
    RMSNorm,
    RowParallel,
    ScaledEmbedding,
    VocabularyEmbedding,
    VocabularyHead,
)
from actors.model.layers.qk_norm import WidthNorm
from actors.model.moe.build import mixture
from placement.model.spec import ModelSpec
from placement.ownership.shard import Shard
from placement.ownership.shards import parameters


class Builder:
    """Builds modules from the rows of the shard table. A bias without a row there is one that the model does not have."""

    def __init__(
        self,
        spec: ModelSpec,
        own: Shard,
        tp: Group,
        backend: Any,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._spec, self._own, self._tp, self._backend = spec, own, tp, backend
        self.ropes = list(dict.fromkeys(spec.rope_of(layer) for layer in own.layers))
        self._table = {
            row.name: nn.Parameter(
                torch.empty(row.shape, dtype=torch.float32 if row.fp32 else dtype, device=device), requires_grad=False
            )
            for row in parameters(spec, own)
        }

    def embedding(self) -> VocabularyEmbedding:
        """Return the embedding with this rank's vocabulary rows, scaled if the model scales it. Its weight is not initialised.
        Raises `KeyError` on a stage without the embedding."""
        parts = (self._table["embed.weight"], self._own.vocab)
        scale = self._spec.embedding_scale
        return VocabularyEmbedding(*parts) if scale == 1 else ScaledEmbedding(*parts, scale)

    def head(self) -> VocabularyHead:
        """Return the output head with this rank's vocabulary rows. It uses the embedding's weight if the model ties them and
        this stage holds the embedding. Raises `KeyError` on a stage without the head."""
        weight = self._table["head.weight"] if "head.weight" in self._table else self._table["embed.weight"]
        parts = (weight, self._own.head_vocab, self._spec.vocab_size)
        cap = self._spec.logit_softcap
        return VocabularyHead(*parts) if cap is None else CappedHead(*parts, cap)

    def layer(self, index: int) -> Layer:
        """Return the decoder layer `index`, numbered in the whole model, with uninitialised weights. Raises `KeyError` if it is
        not in this stage."""
        at = f"layers.{index}"
        return Layer(
            self.norm(f"{at}.input_norm"),
            self.attention(index, f"{at}.attn"),
            self.norm(f"{at}.attn_out_norm"),
            self.norm(f"{at}.post_norm"),
            self.feed_forward(index, f"{at}.mlp"),
            self.norm(f"{at}.mlp_out_norm"),
        )

    def feed_forward(self, index: int, at: str) -> nn.Module:
        """Return the feed-forward part of the layer `index`: an MLP, or a mixture of experts if the layer has experts. Its
        weights have the prefix `at` in the shard table."""
        moe = self._spec.moe_of(index)
        if moe is not None:
            return mixture(self._spec, moe, self._own, self._table, at)
        return GatedMLP(self.column(f"{at}.gate_up"), self.row(f"{at}.down"), ACTIVATIONS[self._spec.activation])

    def attention(self, index: int, at: str) -> nn.Module:
        """Return the attention of the layer `index`, numbered in the whole model: latent or grouped-query, with the norms that
        the model has. Its weights have the prefix `at` in the shard table."""
        spec, own, rope = self._spec, self._own, self.ropes.index(self._spec.rope_of(index))
        params = AttentionParams.of(spec, index, self._table.get(f"{at}.sinks"))
        if spec.mla is not None:
            return latent_attention(spec.mla, self._table, at, params, rope, self._backend)
        parts = (params, rope, self._backend, self.column(f"{at}.qkv"), self.row(f"{at}.o"))
        if spec.qk_norm == "head":
            return NormedAttention(spec, own, *parts, q_norm=self.norm(f"{at}.q_norm"), k_norm=self.norm(f"{at}.k_norm"))
        if spec.qk_norm == "width":
            q_norm, k_norm = (WidthNorm(self._table[f"{at}.{name}.weight"], spec.norm_eps) for name in ("q_norm", "k_norm"))
            return WidthNormedAttention(spec, own, *parts, q_norm=q_norm, k_norm=k_norm, group=self._tp)
        return (GroupedAttention if spec.value_scale == 1 else ScaledValueAttention)(spec, own, *parts)

    def column(self, name: str) -> ColumnParallel:
        """Return the column-parallel layer whose weight is ``{name}.weight`` in the shard table (`KeyError` if there is none),
        with its bias if the table has one."""
        return ColumnParallel(self._table[f"{name}.weight"], self._table.get(f"{name}.bias"))

    def row(self, name: str) -> RowParallel:
        """Return the row-parallel layer whose weight is ``{name}.weight`` in the shard table (`KeyError` if there is none),
        with its bias if the table has one."""
        return RowParallel(self._table[f"{name}.weight"], self._table.get(f"{name}.bias"))

    def norm(self, name: str) -> nn.Module:
        """Return the RMS norm whose weight is ``{name}.weight`` in the shard table, or the identity if the table has none."""
        if f"{name}.weight" not in self._table:
            return nn.Identity()
        weight, eps, offset = self._table[f"{name}.weight"], self._spec.norm_eps, self._spec.norm_offset
        return RMSNorm(weight, eps) if offset == 0 else OffsetRMSNorm(weight, eps, offset)
