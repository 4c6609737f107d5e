"""Context parallelism (CP, DCP): zig-zag token split, round-robin KV block ownership, and the choice of pass-KV or pass-Q.

**Compute** is split zig-zag, which balances the work under the causal mask. Twelve new tokens on ``cp=2`` form 2*cp = 4 chunks,
and rank i runs chunks i and 3-i::

    position     0  1  2 | 3  4  5 | 6  7  8 | 9 10 11
    cp_rank      0  0  0 | 1  1  1 | 1  1  1 | 0  0  0        <- the last token is always on cp rank 0
    keys seen   1+2+3      4+5+6     7+8+9     10+11+12       <- rank 0: 6 + 33, rank 1: 15 + 24: equal

A row with fewer than 2*cp new tokens (a decode, a short chunk) is not split: every cp rank runs all of it.

**Storage** is split by KV block, round robin over the owners: the ``cp * dcp`` ranks that would otherwise hold the same KV
heads. With blocks of 16 tokens and 2 owners::

    logical block        0     1     2     3     4          of a sequence of 70 tokens
    tokens            0-15 16-31 32-47 48-63 64-69
    owner                0     1     0     1     0          logical block j belongs to owner j % owners
    its local index      0     0     1     1     2          the owner's own pages: blocks[owner::owners]

So the owners' shares differ by at most one block, a page holds consecutive positions under any layout, and a cached prefix is
on the same owners for every sequence that shares it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from placement.layout.layout import Layout
from placement.layout.mesh import Coords

BLOCK_TOKENS = 16
"""Number of tokens of one KV block."""


def is_split(new_tokens: int, cp: int) -> bool:
    """Whether a row of `new_tokens` new tokens is split over the `cp` ranks, which requires several ranks and at least one
    token for each of the 2*cp chunks."""
    return cp > 1 and new_tokens >= 2 * cp


def chunks(new_tokens: int, cp: int) -> list[range]:
    """Returns the 2*cp chunks of a split row as ranges of its `new_tokens` new tokens, counted from 0; sizes differ by at most
    one, longer chunks first."""
    each, longer = divmod(new_tokens, 2 * cp)
    sizes = (each + (chunk < longer) for chunk in range(2 * cp))
    return [range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def zigzag(new_tokens: int, cp: int) -> list[tuple[range, range]]:
    """Returns, for each cp rank i, its two chunks of a split row, i and 2*cp-1-i, as ranges of the row's new tokens counted
    from 0. The ranks' totals differ by at most one token."""
    all_chunks = chunks(new_tokens, cp)
    return [(all_chunks[rank], all_chunks[-1 - rank]) for rank in range(cp)]


def spans(start: int, count: int, cp: int, cp_rank: int) -> tuple[range, ...]:
    """Returns the positions that a cp rank runs of a row with the new tokens ``[start, start + count)``: two chunks if the row
    is split over the `cp` ranks (`is_split`), else all.

    The result is a tuple of contiguous ranges of positions in the sequence.
    """
    if not is_split(count, cp):
        return (range(start, start + count),)
    return tuple(range(start + chunk.start, start + chunk.stop) for chunk in zigzag(count, cp)[cp_rank])


def restored_order(rows: Sequence[int], cp: int) -> list[int]:
    """Returns, for each new token of a step (row after row), its index in the concatenation of the cp ranks' tokens in rank
    order.

    `rows` has the number of new tokens of each row. For a row that every rank runs, the tokens of rank 0 are used.
    """
    order: dict[tuple[int, int], int] = {}
    joined = 0
    for rank in range(cp):
        for row, count in enumerate(rows):
            for token in (token for span in spans(0, count, cp, rank) for token in span):
                order.setdefault((row, token), joined)
                joined += 1
    return [order[row, token] for row, count in enumerate(rows) for token in range(count)]


@dataclass(frozen=True)
class Ownership:
    """The KV blocks that one of the owners keeps of every sequence: block j belongs to owner ``j % owners``."""

    owners: int
    owner: int
    block_size: int

    def length(self, tokens: int) -> int:
        """Returns how many of a sequence's first `tokens` tokens this owner keeps."""
        blocks, rest = divmod(tokens, self.block_size)
        full = (blocks - self.owner + self.owners - 1) // self.owners
        return full * self.block_size + (rest if blocks % self.owners == self.owner else 0)

    def positions(self, tokens: int) -> NDArray[np.int64]:
        """Returns the positions, ascending, that this owner keeps of a sequence's first `tokens` tokens."""
        local = np.arange(self.length(tokens), dtype=np.int64)
        return (local // self.block_size * self.owners + self.owner) * self.block_size + local % self.block_size

    def blocks(self, table: list[int]) -> list[int]:
        """Returns this owner's blocks of a sequence: every `owners`-th entry of `table`, the sequence's complete block
        table."""
        return table[self.owner :: self.owners]

    def slot(self, position: int, blocks: list[int]) -> int:
        """Returns the cache slot (``block * block_size + offset``) of a position of a sequence, given this owner's `blocks` of
        it; -1 if another owner keeps the position. Raises `IndexError` if the position is beyond the last of these blocks."""
        block = position // self.block_size
        if block % self.owners != self.owner:
            return -1
        return blocks[block // self.owners] * self.block_size + position % self.block_size


@dataclass(frozen=True)
class ContextRank:
    """A rank's DP rank, and its coordinates among the ranks that share a sequence (cp, and dcp inside its tp group)."""

    block_size: int
    cp: int = 1
    cp_rank: int = 0
    dcp: int = 1
    dcp_rank: int = 0
    dp_rank: int = 0
    dp_size: int = 1

    @classmethod
    def of(cls, layout: Layout, coords: Coords, block_size: int) -> ContextRank:
        """Returns the place of the rank at `coords` in its replica's grid; `block_size` is the number of tokens of a KV
        block."""
        return cls(block_size, layout.cp, coords.cp, layout.dcp, coords.tp % layout.dcp, coords.attn_dp, layout.attn_dp)

    def ownership(self, cp_rank: int | None = None) -> Ownership:
        """Returns the rule by which this rank keeps KV blocks of every sequence: block j belongs to owner ``j % (cp * dcp)``.
        With `cp_rank`, returns the rule of the rank that has this cp rank and the same dcp rank."""
        cp = self.cp_rank if cp_rank is None else cp_rank
        return Ownership(self.cp * self.dcp, cp * self.dcp + self.dcp_rank, self.block_size)

    def spans(self, start: int, count: int, cp_rank: int | None = None) -> tuple[range, ...]:
        """Returns the positions, as contiguous ranges, that this rank, or another `cp_rank`, runs of a row with the new tokens
        ``[start, start + count)``."""
        return spans(start, count, self.cp, self.cp_rank if cp_rank is None else cp_rank)


@dataclass(frozen=True)
class Overlap:
    """Hardware rates that decide whether a KV transfer can be overlapped with compute.

    `flops` is a rank's arithmetic rate in FLOP/s, `bytes_per_s` its bandwidth to the next rank.
    """

    flops: float
    bytes_per_s: float
    element_bytes: int = 2


def passes_kv(new: int, cached: int, q_heads: int, kv_heads: int, cp: int, overlap: Overlap | None = None) -> bool:
    """Whether a split row uses pass-KV (its cached keys and values are sent to the queries) rather than pass-Q.

    `new` and `cached` are the row's numbers of tokens; `q_heads` and `kv_heads` those of heads per rank; `overlap` has the
    hardware rates (None: transfers are not overlapped with compute). The rule is that of Yang et al. 2024 (arXiv 2411.01783).
    KV is exchanged if it is no larger than the queries, ``new / (new + cached) >= 2 kv_heads / q_heads``, or if compute can
    hide its transfer, ``new >= cp * flops * kv_heads * element_bytes / (2 * q_heads * bytes_per_s)``. Exchanged queries return
    as outputs, a transfer that nothing hides. Without overlap (CPU) they therefore count twice, and the limit is ``kv_heads /
    q_heads``. In this case only the ratio matters, and the two may be any weights
    (`placement.ownership.context_heads.weights`).
    """
    share = new / (new + cached)
    if overlap is None:
        return share >= kv_heads / q_heads
    hidden_from = cp * overlap.flops * kv_heads * overlap.element_bytes / (2 * q_heads * overlap.bytes_per_s)
    return share >= 2 * kv_heads / q_heads or new >= hidden_from
