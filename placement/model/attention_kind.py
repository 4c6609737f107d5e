"""Attention kinds: head counts and head sizes that a set of layers has in common.

Layers with equal head counts and sizes are of one kind, and their heads are split over the tensor-parallel (TP) ranks in the
same way. Most models have one kind. In MiMo-V2 the sliding-window layers have more KV heads than the full-attention layers, and
a value is shorter than a key; a rank then holds different heads in the two kinds of layer (12 query heads, ``tp=3``)::

                          tp_rank 0          tp_rank 1          tp_rank 2
    2 KV heads  (full)    q 0-2   kv 0       q 3-5   kv 0       q 6-11   kv 1       <- one KV head is on two ranks
    4 KV heads  (window)  q 0-5   kv 0-1     q 6-8   kv 2       q 9-11   kv 3       <- each is on one
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionKind:
    """Sizes of one attention kind, global (before any split). MLA latents (`placement.model.mla_spec`) count as one KV head::

               query, key   value        values cached per token and KV head        attention output per query head
    plain      key_dim      value_dim    cached_dim = key_dim + value_dim           partial_dim = value_dim
    latent     latent_dim   latent_dim   cached_dim = latent_dim (both at once)     partial_dim = kv_lora_rank
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    cached_dim: int
    partial_dim: int
    label: str = ""
    """Prefix of the names of collectives and traffic of these layers: empty, or ``window`` and a space."""

    @property
    def queries_per_kv(self) -> int:
        """Number of query heads per KV head (one KV group): the unit of an attention split."""
        return self.num_heads // self.num_kv_heads

    @property
    def planes(self) -> int:
        """Number of KV cache tensors of a layer: 2 (keys and values), or 1 (one latent for both)."""
        return 1 if self.cached_dim == self.key_dim else 2


def plain_kind(num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, label: str = "") -> AttentionKind:
    """Returns the kind of multi-head or grouped-query attention, whose cache holds full keys and values. `key_dim` and
    `value_dim` are the dimensions of a key (or query) head and of a value head; `label` is the prefix of the names of its
    collectives."""
    return AttentionKind(num_heads, num_kv_heads, key_dim, value_dim, key_dim + value_dim, value_dim, label)


def latent_kind(num_heads: int, latent_dim: int, kv_lora_rank: int) -> AttentionKind:
    """Returns the kind of multi-head latent attention (MLA), whose cache holds one latent of `latent_dim` values for all
    `num_heads` query heads. `kv_lora_rank` is the size of a head's partial output, before the projection to values."""
    return AttentionKind(num_heads, 1, latent_dim, latent_dim, latent_dim, kv_lora_rank)
