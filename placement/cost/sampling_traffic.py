"""Traffic of vocabulary-parallel sampling: the all-gathers that the sampling parameters of a step's rows require.

One all-gather serves all rows of a step. Rows with min-p but without top-k and top-p require another one before it, and rows
with log-probabilities require two more after it. `width` is the largest number of vocabulary rows of any rank; all ranks send
equal amounts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from placement.cost.collectives import TrafficEntry, all_gather
from placement.cost.step_shape import Choosing

SHORTLISTS = (64, 1024)
"""Upper bounds of top_k by which rows are grouped into shortlists, so that a large top_k does not enlarge every row's list."""

_SCORE_AND_ID = 8
"""Bytes of an fp32 score and an int32 token id."""


def sampling(rows: Sequence[Choosing], vocab_size: int, width: int, axis: str, size: int) -> Iterator[TrafficEntry]:
    """Yields every all-gather of one step's sampling over the `size` ranks of the group `axis`, in order; none without `rows`.

    `rows` are the sampling parameters of the rows that sample a token. `width` is the largest number of vocabulary rows that
    any of the ranks holds.
    """
    if not rows:
        return
    members: dict[str | int, list[Choosing]] = {}
    for row in rows:
        members.setdefault(kind_of(row.greedy, row.top_k, row.top_p, vocab_size), []).append(row)
    noisy = members.get("noisy", [])
    if any(row.min_p for row in noisy):
        yield all_gather("sampling: best logit for min-p", axis, size, 4 * len(noisy))
    yield all_gather("sampling", axis, size, sum(_sent(kind, alike, width) for kind, alike in members.items()))
    yield from _logprobs([row.logprobs for row in rows if row.logprobs is not None], vocab_size, width, axis, size)


def kind_of(greedy: bool, top_k: int, top_p: float, vocab_size: int) -> str | int:
    """Returns the sampling kind of a row with these sampling parameters: ``greedy``, ``noisy``, ``whole``, or the size of its
    shortlist.

    Rows of one kind are sampled together. A shortlist is the smallest of `SHORTLISTS` that holds `top_k` (or `vocab_size`).
    ``noisy`` rows draw from the full distribution without top-k and top-p; ``whole`` rows need all logits, for top-p without
    top-k.
    """
    if greedy:
        return "greedy"
    if 0 < top_k < vocab_size:
        return next((size for size in SHORTLISTS if top_k <= size), vocab_size)
    return "whole" if top_p < 1.0 else "noisy"


def _sent(kind: str | int, rows: Sequence[Choosing], width: int) -> int:
    """Returns the bytes that a rank sends for the rows of one kind."""
    if kind in ("greedy", "noisy"):
        return _SCORE_AND_ID * len(rows)
    if kind == "whole":
        return 4 * width * len(rows)
    return _SCORE_AND_ID * min(max(row.top_k for row in rows), width) * len(rows)


def _logprobs(num_top: Sequence[int], vocab_size: int, width: int, axis: str, size: int) -> Iterator[TrafficEntry]:
    """Yields the all-gather of the sampled tokens' logits, then of best logit (fp32), sum (fp64), rank (int64),
    alternatives."""
    if num_top:
        alternatives = min(max(num_top), vocab_size, width)
        yield all_gather("logprobs: chosen logits", axis, size, 4 * len(num_top))
        yield all_gather("logprobs: sums and ranks", axis, size, (4 + 8 + 8 + _SCORE_AND_ID * alternatives) * len(num_top))
