"""Token ownership for expert dispatch: which tokens each rank of a stage contributes; every token belongs to exactly one rank.

A tp group splits the tokens that it runs. With context parallelism each cp rank contributes its tokens of split rows, and rows
that every cp rank runs (`placement.ownership.context`) are first split over the cp ranks. A decode row and a row of 12 new
tokens, with ``cp=2, tp=2``::

    row                  d | p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11
    run by cp rank 0     d   p0 p1 p2                  p9 p10 p11
           cp rank 1     d            p3 p4 p5 p6 p7 p8
    own tokens, cp 0     p0 p1 p2 p9 | p10 p11 d          tp rank 0 | tp rank 1
                cp 1     p3 p4 p5    | p6 p7 p8

Each DP rank (attn_dp) does this with its own rows; one without rows contributes no tokens. The split follows from the step
plan, which has the DP rank of every row, so ranks need not exchange token counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from placement.layout.layout import Layout
from placement.layout.partition import partition
from placement.ownership.context import is_split, spans

NewLensAcrossDP = Sequence[Sequence[int]]
"""Number of new tokens of each row of a step, per DP rank."""


def num_common(new_lens: Sequence[int], cp: int) -> int:
    """Returns the number of tokens that every cp rank runs, in a step whose rows have `new_lens` new tokens: those of rows too
    short to split; 0 if `cp` is 1."""
    return sum(count for count in new_lens if not is_split(count, cp)) if cp > 1 else 0


def places(new_lens: Sequence[int], cp: int, cp_rank: int) -> tuple[list[int], list[int]]:
    """Splits the tokens that a cp rank runs, of rows with `new_lens` new tokens, into those that only it runs and those that
    all `cp` ranks run.

    Returns two lists of indices into the rank's tokens.
    """
    single: list[int] = []
    common: list[int] = []
    start = 0
    for count in new_lens:
        runs = sum(map(len, spans(0, count, cp, cp_rank)))
        (common if cp > 1 and not is_split(count, cp) else single).extend(range(start, start + runs))
        start += runs
    return single, common


def of_tp_groups(new_lens: Sequence[int], cp: int) -> list[int]:
    """Returns the number of tokens that the tp group of each of the `cp` ranks contributes to expert dispatch, in a step whose
    rows have `new_lens` new tokens."""
    shares = partition(num_common(new_lens, cp), cp)
    split = [count for count in new_lens if cp == 1 or is_split(count, cp)]
    return [
        sum(len(run) for count in split for run in spans(0, count, cp, cp_rank)) + len(shares[cp_rank]) for cp_rank in range(cp)
    ]


def own_tokens(new_lens_across_dp: NewLensAcrossDP, layout: Layout) -> list[int]:
    """Returns the number of tokens that each rank of a stage contributes to expert dispatch, in rank order.
    `new_lens_across_dp` has the number of new tokens of each row, per DP rank."""
    of_groups = [tokens for new_lens in new_lens_across_dp for tokens in of_tp_groups(new_lens, layout.cp)]
    return [len(part) for tokens in of_groups for part in partition(tokens, layout.tp)]


def of_copy(own_tokens: Sequence[int], layout: Layout, copy: int) -> list[int]:
    """Returns the part of `own_tokens`, one count for each rank of a stage, that belongs to the ranks of the MoE copy with the
    moe_dp index `copy`."""
    size = layout.ep * layout.moe_tp
    return list(own_tokens[copy * size : (copy + 1) * size])
