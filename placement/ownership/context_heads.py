"""Head counts of context-parallel attention (CP, DCP): the heads of a dcp group, and exchanged values per token."""

from __future__ import annotations

from placement.layout.layout import Layout
from placement.model.attention_kind import AttentionKind
from placement.ownership.shards import heads


def group_heads(kind: AttentionKind, layout: Layout, tp_rank: int) -> list[range]:
    """Returns the query heads of each rank of the dcp group that the rank `tp_rank` is in, in rank order, in layers of one
    attention kind."""
    first = tp_rank - tp_rank % layout.dcp
    return [q_heads for q_heads, _ in heads(kind, layout.tp, layout.tp_shares)[first : first + layout.dcp]]


def weights(kind: AttentionKind, layout: Layout, tp_rank: int) -> tuple[int, int]:
    """Returns the number of values exchanged per token and layer under pass-Q and under pass-KV, for one attention kind on the
    rank `tp_rank`.

    Pass-Q exchanges the queries of the dcp group's heads and their partial outputs; pass-KV exchanges keys and values. The
    ratio decides between the two (`placement.ownership.context.passes_kv`)::

        pass-Q                                    pass-KV                                ratio
        heads * (key_dim + value_dim)             kv_heads * (key_dim + value_dim)       heads to kv_heads
        heads * (latent_dim + kv_lora_rank)       latent_dim                             latents are far smaller
    """
    _, kv_heads = heads(kind, layout.tp, layout.tp_shares)[tp_rank]
    num_heads = sum(map(len, group_heads(kind, layout, tp_rank)))
    return num_heads * (kind.key_dim + kind.partial_dim), len(kv_heads) * kind.cached_dim
