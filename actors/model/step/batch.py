"""The batch of one step as tensors: the input of the decoder and of the attention backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from placement.ownership.expert_tokens import NewLensAcrossDP

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Batch:
    """The tokens of one step, sequence after sequence.

    Example: two sequences, one prefilling 3 tokens after 16 cached ones, one decoding, with blocks of 16 tokens::

        tokens         [ a16 a17 a18 | b5 ]
        positions      [  16  17  18 |  5 ]
        query_lens     [3, 1]      context_lens  [16, 5]      block_tables [[7, 2], [4]]
        slots          [ 32  33  34 | 69 ]                    slot = block * 16 + offset in the block

    Under context parallelism (`placement.ownership.context`) a batch holds the part of one rank: its own tokens of a row that
    is split over the cp ranks, and its own blocks of every block table. `new_lens` then counts the whole rows.
    """

    token_ids: Tensor
    """[tokens] int64."""
    positions: Tensor
    """[tokens] int64, positions in the whole sequence."""
    slots: Tensor
    """[tokens] int64, the cache slot of each token's K and V; -1 if another rank stores them."""
    query_lens: list[int]
    """Number of tokens of each sequence that this rank runs in this step, at least 1."""
    context_lens: list[int]
    """Number of tokens of each sequence that are in the cache before this step."""
    block_tables: list[list[int]]
    output_rows: Tensor
    """[rows] int64: the tokens of the step whose logits are needed."""
    rope_lens: list[int] = field(default_factory=list)
    """The length that decides each sequence's RoPE frequencies (`RopeSpec.deciding_length`); only length-dependent ropes read
    it."""
    new_lens: list[int] = field(default_factory=list)
    """Number of tokens of each sequence that all cp ranks together run in this step; by default `query_lens`."""
    new_lens_across_dp: NewLensAcrossDP = field(default_factory=list)
    """`new_lens` of every DP rank (attn_dp), including this one; by default there is only this one."""
    copy_offset: int = 0
    """Offset of the step's first token in the round robin over the copies of an expert."""

    def __post_init__(self) -> None:
        if not self.new_lens:
            object.__setattr__(self, "new_lens", self.query_lens)
        if not self.new_lens_across_dp:
            object.__setattr__(self, "new_lens_across_dp", [self.new_lens])

    @property
    def num_tokens(self) -> int:
        """Number of tokens that this rank runs in the step."""
        return int(self.token_ids.shape[0])

    def only(self, rows: Sequence[int]) -> tuple[Batch, Tensor]:
        """Return the batch of the sequences with the indices `rows`, without output rows, and the indices of its tokens in this
        batch [tokens] int64."""
        starts = list(accumulate(self.query_lens, initial=0))
        found = [token for row in rows for token in range(starts[row], starts[row + 1])]
        tokens = torch.tensor(found, dtype=torch.int64, device=self.slots.device)

        def of(values: list[_Value]) -> list[_Value]:
            return [values[row] for row in rows] if values else []

        return Batch(
            token_ids=self.token_ids[tokens],
            positions=self.positions[tokens],
            slots=self.slots[tokens],
            query_lens=of(self.query_lens),
            context_lens=of(self.context_lens),
            block_tables=of(self.block_tables),
            output_rows=self.output_rows[:0],
            rope_lens=of(self.rope_lens),
            new_lens=of(self.new_lens),
        ), tokens
