"""Where hidden states lie between the layers of a tp group, and the collectives at the borders.

Between a row-parallel layer and the next column-parallel one there are only norms and residual sums, which work token by
token. So every rank can do all tokens of this region, or each its own (sequence parallelism: Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2.2)::

    Replicated  [T, h] norm ───────────────→ [T, h] column … row → partial [T, h] ──all_reduce──────→ [T, h]   + residual
    Scattered   [t, h] norm ──all_gather───→ [T, h] column … row → partial [T, h] ──reduce_scatter──→ [t, h]   + residual

A rank's own tokens are those `placement.layout.partition.partition` gives it: 7 tokens on 3 ranks are 3, 2 and 2. They are also
what it sends to the next pipeline stage, in both regions::

    stage 0   rank 0  [0 1 2]──→  rank 0 of stage 1 ─┐
              rank 1  [3 4]  ──→  rank 1             ├─ all_gather (Replicated), or as they are (Scattered)
              rank 2  [5 6]  ──→  rank 2            ─┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from actors.groups.group import Group
from placement.layout import sequence_parallel
from placement.layout.partition import partition


class Region(Protocol):
    """The residual region of one step. `hidden` is what this rank holds there: all tokens, or its own."""

    def gather(self, hidden: Tensor) -> Tensor:
        """All tokens [tokens, hidden], for a column-parallel layer or the head."""

    def keep(self, whole: Tensor) -> Tensor:
        """The inverse of `gather`: what this rank holds of all tokens."""

    def sum(self, partial: Tensor) -> Tensor:
        """From this rank's part of a sum [tokens, hidden] to what it holds of the whole sum."""

    def slice(self, hidden: Tensor) -> Tensor:
        """The rank's own tokens [own, hidden], for the next stage."""

    def join(self, own: Tensor) -> Tensor:
        """The inverse of `slice`, on the next stage."""


class Replicated:
    """Every rank holds all tokens."""

    def __init__(self, tp: Group, own: range, sizes: Sequence[int]) -> None:
        self._tp, self._own, self._sizes = tp, own, sizes

    def gather(self, hidden: Tensor) -> Tensor:
        return hidden

    def keep(self, whole: Tensor) -> Tensor:
        return whole

    def sum(self, partial: Tensor) -> Tensor:
        return self._tp.all_reduce(partial)

    def slice(self, hidden: Tensor) -> Tensor:
        return hidden[self._own.start : self._own.stop]

    def join(self, own: Tensor) -> Tensor:
        return self._tp.all_gather(own, self._sizes)


class Scattered:
    """Every rank holds its own tokens."""

    def __init__(self, tp: Group, own: range, sizes: Sequence[int]) -> None:
        self._tp, self._own, self._sizes = tp, own, sizes

    def gather(self, hidden: Tensor) -> Tensor:
        return self._tp.all_gather(hidden, self._sizes)

    def keep(self, whole: Tensor) -> Tensor:
        return whole[self._own.start : self._own.stop]

    def sum(self, partial: Tensor) -> Tensor:
        return self._tp.reduce_scatter(partial, self._sizes)

    def slice(self, hidden: Tensor) -> Tensor:
        return hidden

    def join(self, own: Tensor) -> Tensor:
        return own


class Regions:
    """Makes the region of each step, by a rule that every rank finds in the plan."""

    def __init__(self, tp: Group, scatter_from: int | None) -> None:
        """`scatter_from`: prompt tokens of a step from which on it is scattered; None: never."""
        self._tp, self._scatter_from = tp, scatter_from

    def own(self, num_tokens: int) -> range:
        """This rank's own tokens of a step."""
        return partition(num_tokens, self._tp.size)[self._tp.rank]

    def of(self, query_lens: Sequence[int]) -> Region:
        """The region of a step whose rows run `query_lens` tokens each."""
        parts = partition(sum(query_lens), self._tp.size)
        own, sizes = parts[self._tp.rank], [len(part) for part in parts]
        if sequence_parallel.is_scattered(query_lens, self._scatter_from):
            return Scattered(self._tp, own, sizes)
        return Replicated(self._tp, own, sizes)
