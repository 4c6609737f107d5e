"""Regions of hidden states between the layers of a TP group, and their collectives (tensor and sequence parallelism).

Between a row-parallel layer and the next column-parallel one there are only norms and residual sums, which work token by token.
In this region every rank can therefore hold all tokens, or each only its own (sequence parallelism: Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2.2)::

    Replicated  [T, h] norm ───────────────→ [T, h] column … row → partial [T, h] ──all_reduce──────→ [T, h]   + residual
    Scattered   [t, h] norm ──all_gather───→ [T, h] column … row → partial [T, h] ──reduce_scatter──→ [t, h]   + residual

A rank's own tokens are those that `placement.layout.partition.partition` assigns to it: 7 tokens on 3 ranks are 3, 2 and 2. In
both regions a rank sends its own tokens to the next pipeline stage::

    stage 0   rank 0  [0 1 2]──→  rank 0 of stage 1 ─┐
              rank 1  [3 4]  ──→  rank 1             ├─ all_gather (Replicated), or kept (Scattered)
              rank 2  [5 6]  ──→  rank 2            ─┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from actors.groups.group import Group
from actors.model.kernels.native.program import in_program
from placement.layout import sequence_parallel
from placement.layout.partition import partition


class Region(Protocol):
    """The residual region of one step. `hidden` is this rank's part of the hidden states: all tokens, or its own."""

    def gather(self, hidden: Tensor) -> Tensor:
        """Return all tokens [tokens, hidden], for a column-parallel layer or the head, from this rank's part `hidden`. A
        collective of the tp group if the parts differ."""

    def keep(self, whole: Tensor) -> Tensor:
        """Return this rank's part of `whole` [tokens, hidden], which has all tokens: the inverse of `gather`, without
        communication."""

    def sum(self, partial: Tensor) -> Tensor:
        """Return this rank's part of the sum of `partial` [tokens, hidden] over the tp ranks. A collective of the tp group."""

    def slice(self, hidden: Tensor) -> Tensor:
        """Return the rank's own tokens [own, hidden] from its part `hidden`, for the next pipeline stage, without
        communication."""

    def join(self, own: Tensor) -> Tensor:
        """Return this rank's part of the hidden states, from its own tokens `own` [own, hidden]: the inverse of `slice`, on the
        next pipeline stage. A collective of the tp group if every rank holds all tokens."""


class Replicated:
    """The region in which every rank holds all tokens."""

    def __init__(self, tp: Group, own: range, sizes: Sequence[int]) -> None:
        self._tp, self._own, self._sizes = tp, own, sizes

    def gather(self, hidden: Tensor) -> Tensor:
        """See `Region.gather`."""
        return hidden

    def keep(self, whole: Tensor) -> Tensor:
        """See `Region.keep`."""
        return whole

    def sum(self, partial: Tensor) -> Tensor:
        """See `Region.sum`."""
        return in_program(self._tp.all_reduce, partial) if self._tp.size > 1 else self._tp.all_reduce(partial)

    def slice(self, hidden: Tensor) -> Tensor:
        """See `Region.slice`."""
        return hidden[self._own.start : self._own.stop]

    def join(self, own: Tensor) -> Tensor:
        """See `Region.join`."""
        return self._tp.all_gather(own, self._sizes)


class Scattered:
    """The region in which every rank holds its own tokens (sequence parallelism)."""

    def __init__(self, tp: Group, own: range, sizes: Sequence[int]) -> None:
        self._tp, self._own, self._sizes = tp, own, sizes

    def gather(self, hidden: Tensor) -> Tensor:
        """See `Region.gather`."""
        return self._tp.all_gather(hidden, self._sizes)

    def keep(self, whole: Tensor) -> Tensor:
        """See `Region.keep`."""
        return whole[self._own.start : self._own.stop]

    def sum(self, partial: Tensor) -> Tensor:
        """See `Region.sum`."""
        return self._tp.reduce_scatter(partial, self._sizes)

    def slice(self, hidden: Tensor) -> Tensor:
        """See `Region.slice`."""
        return hidden

    def join(self, own: Tensor) -> Tensor:
        """See `Region.join`."""
        return own


class Regions:
    """Makes the region of each step, by a rule that all ranks evaluate on the same step plan."""

    def __init__(self, tp: Group, scatter_from: int | None) -> None:
        """`scatter_from` is the number of prompt tokens from which a step is scattered; None: never."""
        self._tp, self._scatter_from = tp, scatter_from

    def own(self, num_tokens: int) -> range:
        """Return the range of this rank's own tokens among the `num_tokens` tokens of a step."""
        return partition(num_tokens, self._tp.size)[self._tp.rank]

    def of(self, query_lens: Sequence[int]) -> Region:
        """Return the region of a step whose sequences run `query_lens` tokens each: sequence parallel if they have enough
        prompt tokens."""
        parts = partition(sum(query_lens), self._tp.size)
        own, sizes = parts[self._tp.rank], [len(part) for part in parts]
        if sequence_parallel.is_scattered(query_lens, self._scatter_from):
            return Scattered(self._tp, own, sizes)
        return Replicated(self._tp, own, sizes)
