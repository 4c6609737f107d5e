"""From the last stage's hidden states to logits: of a DP rank's own rows, or of those of all DP ranks
(`placement.layout.lm_head`).

Two DP ranks of two tp ranks, the head over the stage; DP rank 0 wants tokens for rows a b c, DP rank 1 for row d::

    hidden states     rank 0: a b c     rank 1: a b c     rank 2: d     rank 3: d
    brings            a b               c                 d             -            its share of its DP rank's
    all_gather        a b c d           a b c d           a b c d       a b c d
    logits of         rows 0-24         25-49             50-74         75-99        of the vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from actors.groups.group import Group
from actors.model.decoder import Decoder
from placement.layout.mesh import Coords
from placement.layout.partition import partition


class LMHead(Protocol):
    """Makes logits. `is_shared`: all ranks of the stage's cp rank 0 call it together, for the rows of all DP ranks."""

    is_shared: bool

    def logits(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """fp32 [rows, own part of the vocabulary] from this DP rank's hidden states `rows` [counts[dp_rank], hidden].

        `counts`: rows of each DP rank. A shared head gives those of all DP ranks, in DP rank order.
        """


class DPRankHead:
    """A DP rank's own."""

    is_shared = False

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def logits(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return self._decoder.logits(rows)


class StageHead:
    """One for all DP ranks."""

    is_shared = True

    def __init__(self, decoder: Decoder, group: Group, coords: Coords, tp: int) -> None:
        """`group`: the ranks of all DP ranks, in DP rank order, `tp` in each."""
        self._decoder, self._group, self._coords, self._tp = decoder, group, coords, tp

    def logits(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        shares = [len(part) for count in counts for part in partition(count, self._tp)]
        own = partition(counts[self._coords.attn_dp], self._tp)[self._coords.tp]
        return self._decoder.logits(self._group.all_gather(rows[own.start : own.stop], shares))
