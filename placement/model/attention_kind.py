"""What the heads of a layer are: layers whose heads are alike are of one kind, and are placed alike.

Most models have one kind. In MiMo-V2 the layers with a window have more KV heads than the others, and a value is shorter than
a key; a rank then holds other heads in the one kind of layer than in the other (12 query heads, ``tp=3``)::

                          tp_rank 0          tp_rank 1          tp_rank 2
    2 KV heads  (full)    q 0-2   kv 0       q 3-5   kv 0       q 6-11   kv 1       <- one KV head is on two ranks
    4 KV heads  (window)  q 0-5   kv 0-1     q 6-8   kv 2       q 9-11   kv 3       <- each is on one
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionKind:
    """Sizes of one kind of attention, whole (before any split). Latents (`placement.model.mla_spec`) are one KV head::

               query, key   value        a token in the cache, for each KV head     what comes back for a query
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
    """Stands before the names of what layers of this kind do: empty, or ``window`` and a space."""

    @property
    def queries_per_kv(self) -> int:
        """Query heads of one KV group: the unit of an attention split."""
        return self.num_heads // self.num_kv_heads

    @property
    def planes(self) -> int:
        """Tensors that the cache of a layer has: keys and values, or one latent for both."""
        return 1 if self.cached_dim == self.key_dim else 2


def plain_kind(num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, label: str = "") -> AttentionKind:
    """Keys and values as they are."""
    return AttentionKind(num_heads, num_kv_heads, key_dim, value_dim, key_dim + value_dim, value_dim, label)


def latent_kind(num_heads: int, latent_dim: int, kv_lora_rank: int) -> AttentionKind:
    """One latent for all heads."""
    return AttentionKind(num_heads, 1, latent_dim, latent_dim, latent_dim, kv_lora_rank)
