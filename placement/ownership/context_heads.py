"""What is exchanged where the keys of a sequence lie on several ranks: whose heads a dcp group has, what keys and queries
weigh."""

from __future__ import annotations

from placement.layout.layout import Layout
from placement.model.attention_kind import AttentionKind
from placement.ownership.shards import heads


def group_heads(kind: AttentionKind, layout: Layout, tp_rank: int) -> list[range]:
    """Query heads of each rank of the dcp group of a tp rank, in layers of a kind."""
    first = tp_rank - tp_rank % layout.dcp
    return [q_heads for q_heads, _ in heads(kind, layout.tp, layout.tp_shares)[first : first + layout.dcp]]


def weights(kind: AttentionKind, layout: Layout, tp_rank: int) -> tuple[int, int]:
    """What is exchanged for each token in a layer of a kind, in values: its queries of the dcp group's heads and the parts
    that come back for them, or its keys and values. The proportion decides which it is to be
    (`placement.ownership.context.passes_kv`)::

        heads * (key_dim + value_dim)             kv_heads * (key_dim + value_dim)       as heads to kv_heads
        heads * (latent_dim + kv_lora_rank)       latent_dim                             latents weigh next to nothing
    """
    _, kv_heads = heads(kind, layout.tp, layout.tp_shares)[tp_rank]
    num_heads = sum(map(len, group_heads(kind, layout, tp_rank)))
    return num_heads * (kind.key_dim + kind.partial_dim), len(kv_heads) * kind.cached_dim
