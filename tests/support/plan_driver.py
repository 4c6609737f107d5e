"""Runs hand-made plans on all ranks of a layout, as threads, and returns what every prompt position scored.

The schedules of `tests.support.models.tiny_decoder` become plans; block tables are shuffled, owner by owner.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from actors.rank.threads import ThreadRanks
from actors.wire.plans import Row, SequenceStart, StepPlan
from actors.wire.requests import SamplingParams
from placement.layout.layout import Layout
from tests.support.inprocess import rank_config
from tests.support.models.tiny_decoder import Schedule
from tests.support.models.tiny_models import TinyModel

_WAIT_S = 60.0
_BLOCK = 4
_TOP = 5
_EACH = 400
"""Blocks of every rank."""


class Driver:
    """Plays schedules one after the other on the same ranks."""

    def __init__(self, ranks: ThreadRanks, layout: Layout) -> None:
        self._ranks, self._owners = ranks, layout.kv_owners
        self._step = 0
        self._first_id = 0

    def play(self, sequences: list[list[int]], schedule: Schedule) -> list[Tensor]:
        """Of each sequence [tokens - 1, 1 + top]: log-probability of the token that follows, and the largest ones.

        Deterministic: the same schedule on the same layout gets the same pages.
        """
        ids = range(self._first_id, self._first_id + len(sequences))
        self._first_id += len(sequences)
        tables = self._tables(sequences)
        told = [0] * len(sequences)
        found: list[dict[int, list[float]]] = [{} for _ in sequences]
        for parts in schedule:
            started = [self._start(ids[index], sequences[index]) for index, start, _ in parts if start == 0]
            rows = []
            for index, start, count in parts:
                needed = -(-(start + count) // _BLOCK)
                rows.append(
                    Row(sequence_id=ids[index], start=start, count=count, new_blocks=tables[index][told[index] : needed])
                )
                told[index] = max(told[index], needed)
            self._run(StepPlan(step=self._step, started=started, rows=rows), ids.start, found)
        self._run(StepPlan(step=self._step, ended=list(ids), rows=[]), ids.start, found)
        return [torch.tensor([scores[at] for at in sorted(scores)]) for scores in found]

    def _run(self, plan: StepPlan, first_id: int, found: list[dict[int, list[float]]]) -> None:
        self._step += 1
        self._ranks.send(plan)
        result = self._ranks.receive(_WAIT_S)
        for piece in result.prompt_logprobs:
            for at, entry in enumerate(piece.entries, start=piece.first):
                values = [entry.logprob, *(logprob for _, logprob in entry.top)]
                found[piece.sequence_id - first_id][at] = values

    def _tables(self, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        pools = [random.Random(owner).sample(range(_EACH), _EACH) for owner in range(self._owners)]
        return [[pools[block % self._owners].pop() for block in range(-(-len(tokens) // _BLOCK))] for tokens in sequences]

    @staticmethod
    def _start(sequence_id: int, tokens: list[int]) -> SequenceStart:
        sampling = SamplingParams(prompt_logprobs=_TOP)
        return SequenceStart(sequence_id=sequence_id, tokens=tokens, prompt_length=len(tokens), sampling=sampling)


@contextmanager
def driver(model: TinyModel, layout: Layout, dtype: torch.dtype = torch.float32) -> Iterator[Driver]:
    """The ranks of `layout`, ready for schedules."""
    ranks = ThreadRanks(rank_config(model, layout, dtype, _BLOCK), _EACH)
    try:
        yield Driver(ranks, layout)
    finally:
        ranks.close()
