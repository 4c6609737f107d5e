"""Decode context parallelism (DCP): the sizes that a tp group allows."""

from __future__ import annotations

from collections import Counter

from placement.layout.partition import Shares
from placement.model.attention_kind import AttentionKind
from placement.model.spec import ModelSpec
from placement.ownership.shards import heads


def legal_dcp(spec: ModelSpec, tp: int, shares: Shares = None) -> list[int]:
    """Returns, ascending, the dcp sizes of a group of `tp` ranks for which every run of `dcp` consecutive ranks holds one and
    the same KV head.

    If ``tp % kv_heads == 0``, these are the divisors of ``tp // kv_heads``. With uneven replication (5 ranks on 2 heads: 3 and
    2) the numbers of holders differ by one, so that only 1 divides them all; `shares`, the relative sizes of the tp ranks, may
    lead to other numbers of holders. Query heads need not divide. Latents are one KV head, so all divisors of `tp` are legal.
    If the layers are of two attention kinds, a size must be legal for both.
    """
    return sorted(set.intersection(*(set(legal_dcp_of_kind(kind, tp, shares)) for kind in spec.kinds)))


def legal_dcp_of_kind(kind: AttentionKind, tp: int, shares: Shares) -> list[int]:
    """Returns, ascending, the legal dcp sizes of a group of `tp` ranks for the layers of one attention kind (see `legal_dcp`);
    `shares` are the relative sizes of the tp ranks (None: equal)."""
    if tp <= kind.num_kv_heads:
        return [1]
    holders = Counter(own.start for _, own in heads(kind, tp, shares)).values()
    return [size for size in range(1, min(holders) + 1) if all(count % size == 0 for count in holders)]
