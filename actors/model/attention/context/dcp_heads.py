"""Decode context parallelism (DCP): the ranks of a dcp group share one KV head, whose positions are split among them.

Each rank has its own query heads for that KV head and needs their attention over all positions. Queries are therefore gathered,
and partial outputs are returned, in two collectives a layer::

    rank 0   q0 ─┐ all_gather   [q0 q1] x keys of rank 0 ─┐ all_to_all   q0: parts of rank 0 and 1, merged
    rank 1   q1 ─┘              [q0 q1] x keys of rank 1 ─┘              q1: parts of rank 0 and 1, merged

Keys and values are never sent: every rank of the group computes those of each new token, and the owner of its position stores
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.groups.group import Group
from actors.model.attention.partial_outputs import OutputAccumulator, merge_packed, pack


class HeadExchange:
    """The two collectives of one dcp group. `heads` is the number of query heads of each rank; the ranks may differ."""

    def __init__(self, dcp: Group, heads: Sequence[int]) -> None:
        self._dcp, self._heads = dcp, list(heads)

    @property
    def num_heads(self) -> int:
        """Number of query heads of all ranks of the dcp group together."""
        return sum(self._heads)

    def gather(self, q: Tensor) -> Tensor:
        """Return the queries of the whole dcp group [tokens, all heads, dim], contiguous, from this rank's `q` [tokens, own
        heads, dim]. A collective of the group."""
        return self._dcp.all_gather(q.transpose(0, 1).contiguous(), self._heads).transpose(0, 1).contiguous()

    def scatter(self, parts: OutputAccumulator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return this rank's heads over all keys, from `parts`, the partial outputs of the group's heads over this rank's keys,
        which are sent in `dtype`. A collective of the group.

        Returns the output [own heads, tokens, dim] and its LSE [own heads, tokens], both fp32.
        """
        own, size = self._heads[self._dcp.rank], self._dcp.size
        received = self._dcp.all_to_all(pack(parts.out, parts.lse, dtype), self._heads, [own] * size)
        return merge_packed(received.view(size, own, *received.shape[1:]))
