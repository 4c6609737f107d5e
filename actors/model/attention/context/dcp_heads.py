"""Decode context parallelism: the ranks of a dcp group hold one KV head, its positions split among them.

Each rank has query heads of its own for that KV head, and needs their attention over all positions. So queries go to the keys,
and partial outputs come back, in two collectives a layer::

    rank 0   q0 ─┐ all_gather   [q0 q1] x keys of rank 0 ─┐ all_to_all   q0: parts of rank 0 and 1, merged
    rank 1   q1 ─┘              [q0 q1] x keys of rank 1 ─┘              q1: parts of rank 0 and 1, merged

Keys and values themselves are never sent: every rank of the group computes those of each new token, and their owner keeps
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.groups.group import Group
from actors.model.attention.partial_outputs import OutputAccumulator, merge_packed, pack


class HeadExchange:
    """The two collectives of one dcp group whose ranks have `heads` query heads each (they may differ)."""

    def __init__(self, dcp: Group, heads: Sequence[int]) -> None:
        self._dcp, self._heads = dcp, list(heads)

    @property
    def num_heads(self) -> int:
        """Query heads of the whole group."""
        return sum(self._heads)

    def gather(self, q: Tensor) -> Tensor:
        """Own queries [tokens, own heads, dim] -> those of the whole group [tokens, all heads, dim], contiguous."""
        return self._dcp.all_gather(q.transpose(0, 1).contiguous(), self._heads).transpose(0, 1).contiguous()

    def scatter(self, parts: OutputAccumulator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What this rank's keys gave all heads -> what all ranks' keys gave own heads: output [own heads, tokens, dim], LSE."""
        own, size = self._heads[self._dcp.rank], self._dcp.size
        received = self._dcp.all_to_all(pack(parts.out, parts.lse, dtype), self._heads, [own] * size)
        return merge_packed(received.view(size, own, *received.shape[1:]))
