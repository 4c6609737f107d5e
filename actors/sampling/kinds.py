"""Vocabulary-parallel sampling: three ways to choose a token from logits split over TP ranks, each exact, with one exchange.

    Race        greedy, and temperature with min-p at most    every rank sends its best (score, id)     8 bytes a row
    Shortlist   top-k, with or without top-p and min-p        every rank sends its own top k            8 k bytes a row
    FullLogits  top-p alone, which needs the whole mass       every rank sends its logits               4 V/n bytes a row

The kind of a row follows from its parameters alone, so all ranks issue the same collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from actors.sampling.best import Candidates, best
from actors.sampling.blocks import blocks
from actors.sampling.filters import draw, draw_from_all, min_p_floor, temperatures
from actors.sampling.noise import gumbel_of
from actors.sampling.rows import SampleRow, is_greedy
from actors.sampling.shard import VocabShard
from placement.cost.sampling_traffic import kind_of


class Kind(Protocol):
    """Rows that are chosen in the same way. `index` are their indices in the step."""

    index: list[int]

    def send(self, logits: Tensor) -> list[Tensor]:
        """Return the tensors that this rank contributes to the all-gather, from its fp32 logits [rows, width] of the rows
        `index`, in that order. Every tensor begins with dimension rows."""

    def choose(self, gathered: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Choose a token for each row of `index`. `gathered` has, for each tensor that `send` returned, those of all ranks
        [ranks, rows, ...]. Returns ids [rows] int32, and a number [rows] that is finite if the choice is valid."""


class Race:
    """Each rank's best score competes with those of the others. The score is the logit, or the scaled logit plus noise."""

    def __init__(self, shard: VocabShard, rows: list[SampleRow], index: list[int], greedy: bool) -> None:
        self._shard, self._rows, self.index, self._greedy = shard, rows, index, greedy

    def send(self, logits: Tensor) -> list[Tensor]:
        """See `Kind.send`. Returns the best scores and their ids, both [rows]; among equal scores the lowest id is taken. A
        collective of the TP group if a row has min-p."""
        scores, columns = logits.max(dim=-1) if self._greedy else self._draw(logits)
        return [scores, self._shard.ids[columns]]

    def choose(self, gathered: list[Tensor]) -> tuple[Tensor, Tensor]:
        """See `Kind.choose`. The number is the winning score."""
        scores, ranks = gathered[0].max(dim=0)
        return gathered[1].gather(0, ranks.unsqueeze(0)).squeeze(0), scores

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest noisy scores and their columns, both [rows]."""
        temperature, floor = temperatures(self._rows, logits.device), self._floor(logits)
        found = [
            self._draw_block(logits[b] / temperature[b], self._rows[b], None if floor is None else floor[b])
            for b in blocks(logits)
        ]
        scores, columns = zip(*found, strict=True)
        return torch.cat(scores), torch.cat(columns)

    def _draw_block(self, scaled: Tensor, rows: list[SampleRow], floor: Tensor | None) -> tuple[Tensor, Tensor]:
        noise = gumbel_of([row.sampling.seed for row in rows], [row.position for row in rows], self._shard.ids)
        noisy = noise.add_(scaled)
        if floor is not None:
            noisy.masked_fill_(scaled < floor, -torch.inf)
        scores, columns = noisy.max(dim=-1)
        return scores, columns

    def _floor(self, logits: Tensor) -> Tensor | None:
        """Return the lowest scaled logit that passes min-p. It depends on the best logit of all ranks: an exchange only with
        such rows."""
        min_p = [row.sampling.min_p for row in self._rows]
        if not any(min_p):
            return None
        peaks = self._shard.gather([logits.amax(dim=-1, keepdim=True)])[0].amax(dim=0)
        return min_p_floor(peaks / temperatures(self._rows, logits.device), min_p)


class Shortlist:
    """The top k of the whole vocabulary are among the top k of each rank."""

    def __init__(self, shard: VocabShard, rows: list[SampleRow], index: list[int]) -> None:
        self._shard, self._rows, self.index = shard, rows, index
        self._count = max(row.sampling.top_k for row in rows)

    def send(self, logits: Tensor) -> list[Tensor]:
        """See `Kind.send`. Returns the logits and ids of this rank's top k, both [rows, k], where k is the largest top_k of the
        rows."""
        return list(best(logits, self._shard.ids, self._count))

    def choose(self, gathered: list[Tensor]) -> tuple[Tensor, Tensor]:
        """See `Kind.choose`. The number is the best logit."""
        logits, ids = (part.transpose(0, 1).flatten(1) for part in gathered)
        candidates = Candidates(logits, ids) if len(gathered[0]) == 1 else best(logits, ids, self._count)
        return draw(candidates, self._rows), candidates.logits[:, 0]


class FullLogits:
    """Every rank gathers the whole logits of these rows, and draws the same token."""

    def __init__(self, shard: VocabShard, rows: list[SampleRow], index: list[int]) -> None:
        self._shard, self._rows, self.index = shard, rows, index

    def send(self, logits: Tensor) -> list[Tensor]:
        """See `Kind.send`. Returns the logits themselves, [rows, width]."""
        return [logits]

    def choose(self, gathered: list[Tensor]) -> tuple[Tensor, Tensor]:
        """See `Kind.choose`. The number is the best logit."""
        return draw_from_all(self._shard.join(gathered[0]), self._rows)


def kinds(shard: VocabShard, rows: Sequence[SampleRow]) -> Iterator[Kind]:
    """Yield the rows of a step grouped by the way in which they are sampled; each `Kind` has their indices in `rows`. `shard`
    is this rank's vocabulary. The order is the same on all ranks."""
    sorted_rows: dict[str | int, list[int]] = {}
    for at, row in enumerate(rows):
        params = row.sampling
        sorted_rows.setdefault(kind_of(is_greedy(params), params.top_k, params.top_p, shard.vocab_size), []).append(at)
    for kind, index in sorted_rows.items():
        members = [rows[at] for at in index]
        if kind in ("greedy", "noisy"):
            yield Race(shard, members, index, greedy=kind == "greedy")
        elif kind == "whole":
            yield FullLogits(shard, members, index)
        else:
            yield Shortlist(shard, members, index)
