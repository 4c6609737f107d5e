"""The exchanges of the sampler, from how each row is chosen and how wide a rank's part of the vocabulary is.

Everything a step's rows need is packed in one all-gather; rows with min-p and nothing else ask for one more, before
it, and rows with log-probabilities for two more, after it. `width` is that of the widest rank: all send as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from placement.cost.collectives import TrafficEntry, all_gather
from placement.cost.step_shape import Choosing

SHORTLISTS = (64, 1024)
"""Rows whose top_k is no more than these share a shortlist; larger ones share another, so that none pays for all."""

_SCORE_AND_ID = 8
"""fp32 score, int32 id."""


def sampling(rows: Sequence[Choosing], vocab_size: int, width: int, axis: str, size: int) -> Iterator[TrafficEntry]:
    """Every all-gather of one step's sampling, in order; `rows` are those that choose a token, over `size` ranks of `axis`."""
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
    """Rows of one kind are chosen together: ``greedy``, ``noisy``, ``whole``, or the size of the shortlist they share."""
    if greedy:
        return "greedy"
    if 0 < top_k < vocab_size:
        return next((size for size in SHORTLISTS if top_k <= size), vocab_size)
    return "whole" if top_p < 1.0 else "noisy"


def _sent(kind: str | int, rows: Sequence[Choosing], width: int) -> int:
    """Bytes a rank sends for the rows of one kind."""
    if kind in ("greedy", "noisy"):
        return _SCORE_AND_ID * len(rows)
    if kind == "whole":
        return 4 * width * len(rows)
    return _SCORE_AND_ID * min(max(row.top_k for row in rows), width) * len(rows)


def _logprobs(num_top: Sequence[int], vocab_size: int, width: int, axis: str, size: int) -> Iterator[TrafficEntry]:
    """The logit of each chosen token; then best logit (fp32), sum (fp64), rank (int64), and the alternatives."""
    if num_top:
        alternatives = min(max(num_top), vocab_size, width)
        yield all_gather("logprobs: chosen logits", axis, size, 4 * len(num_top))
        yield all_gather("logprobs: sums and ranks", axis, size, (4 + 8 + 8 + _SCORE_AND_ID * alternatives) * len(num_top))
