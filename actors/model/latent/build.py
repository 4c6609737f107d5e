"""Builds the latent attention (MLA) of one layer from the parameters of the shard table."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from actors.model.attention.params import AttentionParams
from actors.model.latent.backend import LatentBackend
from actors.model.latent.heads import LatentHeads
from actors.model.latent.layer import LatentAttention, LowRankLatentAttention
from actors.model.layers.layers import ColumnParallel, RMSNorm, RowParallel
from placement.model.mla_spec import MLASpec


def latent_attention(
    mla: MLASpec, table: Mapping[str, nn.Parameter], at: str, params: AttentionParams, rope: int, backend: LatentBackend
) -> LatentAttention:
    """Return the latent attention (MLA) of the layer whose weights have the prefix `at` in `table`, the parameters by name
    (`KeyError` if one is missing); `rope` is the layer's index among the step's rotations."""

    def norm(name: str) -> RMSNorm:
        return RMSNorm(table[f"{at}.{name}.weight"], mla.norm_eps)

    def column(name: str) -> ColumnParallel:
        return ColumnParallel(table[f"{at}.{name}.weight"], table.get(f"{at}.{name}.bias"))

    o = RowParallel(table[f"{at}.o.weight"], table.get(f"{at}.o.bias"))
    heads = LatentHeads(table[f"{at}.kv_b.weight"], mla)
    parts = (params, rope, backend, column("qkv_a"), norm("kv_a_norm"), heads, o)
    if mla.q_lora_rank is None:
        return LatentAttention(*parts)
    return LowRankLatentAttention(*parts, q_a_norm=norm("q_a_norm"), q_b=column("q_b"))
