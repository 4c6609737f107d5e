"""The LM head: computes logits from the last stage's hidden states, for the rows of one DP rank or of all DP ranks
(`placement.layout.lm_head`).

An example with two DP ranks of two tp ranks each, and the head split over the whole stage. DP rank 0 samples for rows a b c, DP
rank 1 for row d::

    hidden states     rank 0: a b c     rank 1: a b c     rank 2: d     rank 3: d
    contributes       a b               c                 d             -            its share of its DP rank's rows
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
    """Computes logits from hidden states.

    If `is_shared` is true, `logits` is a collective call: all ranks of the stage with cp rank 0 call it together, for the rows
    of all DP ranks.
    """

    is_shared: bool

    def logits(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return fp32 logits `[rows, own vocabulary slice]` of hidden states.

        `rows` holds this DP rank's hidden states `[counts[dp_rank], hidden]`, and `counts` the number of rows of each DP rank.
        A shared head returns the logits of all DP ranks, in DP rank order; otherwise only this DP rank's.
        """


class DPRankHead:
    """An LM head that each DP rank holds and computes for itself."""

    is_shared = False

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def logits(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """See `LMHead.logits`. Returns only this DP rank's rows; `counts` is not used."""
        return self._decoder.logits(rows)


class StageHead:
    """An LM head that is split over the ranks of all DP ranks."""

    is_shared = True

    def __init__(self, decoder: Decoder, group: Group, coords: Coords, tp: int) -> None:
        """Create the head. `group` holds the ranks of all DP ranks, in DP rank order, `tp` ranks for each."""
        self._decoder, self._group, self._coords, self._tp = decoder, group, coords, tp

    def logits(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """See `LMHead.logits`. A collective call, which returns the rows of all DP ranks."""
        shares = [len(part) for count in counts for part in partition(count, self._tp)]
        own = partition(counts[self._coords.attn_dp], self._tp)[self._coords.tp]
        return self._decoder.logits(self._group.all_gather(rows[own.start : own.stop], shares))
