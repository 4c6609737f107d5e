"""One step as tensors: what the decoder and the attention backends are given, as an argument, every step."""

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

    Two sequences, one prefilling 3 tokens after 16 cached ones, one decoding, blocks of 16 tokens::

        tokens         [ a16 a17 a18 | b5 ]
        positions      [  16  17  18 |  5 ]
        query_lens     [3, 1]      context_lens  [16, 5]      block_tables [[7, 2], [4]]
        slots          [ 32  33  34 | 69 ]                    slot = block * 16 + offset in the block

    With context parallelism (`placement.ownership.context`) it is what one rank runs and holds of them: of a row that is split
    over the cp ranks its own tokens, of every block table its own blocks. `new_lens` then are the whole rows.
    """

    token_ids: Tensor
    """[tokens] int64."""
    positions: Tensor
    """[tokens] int64, true positions in the sequence."""
    slots: Tensor
    """[tokens] int64, where each token's K and V go; -1 where that is another rank."""
    query_lens: list[int]
    """Tokens of each sequence that this rank runs in this step, at least 1."""
    context_lens: list[int]
    """Tokens of each sequence that are in the cache before this step."""
    block_tables: list[list[int]]
    output_rows: Tensor
    """[rows] int64: tokens of the step whose logits are wanted."""
    rope_lens: list[int] = field(default_factory=list)
    """Length each sequence counts as having (`RopeSpec.deciding_length`); read only by ropes that depend on it."""
    new_lens: list[int] = field(default_factory=list)
    """Tokens of each sequence that all cp ranks together run in this step; not given: `query_lens`."""
    new_lens_across_dp: NewLensAcrossDP = field(default_factory=list)
    """`new_lens` of every DP rank (attn_dp), of which this batch is one; not given: there is no other."""
    copy_offset: int = 0
    """Where the step's first token begins in the round robin over an expert's copies."""

    def __post_init__(self) -> None:
        if not self.new_lens:
            object.__setattr__(self, "new_lens", self.query_lens)
        if not self.new_lens_across_dp:
            object.__setattr__(self, "new_lens_across_dp", [self.new_lens])

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    def only(self, rows: Sequence[int]) -> tuple[Batch, Tensor]:
        """The batch of the sequences `rows`, without output rows, and the tokens of this batch that it has [tokens] int64."""
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
