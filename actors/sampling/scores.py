"""Logprobs from slices of raw logits: of given tokens and of the most likely ones, and the rank of a token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.sampling.best import best
from actors.sampling.blocks import blocks
from actors.sampling.shard import VocabShard
from actors.wire.requests import TokenLogprob

FLOOR = -9999.0
"""Log-probability reported for an impossible token (and for NaN), because JSON has no infinities."""


def score(shard: VocabShard, logits: Tensor, targets: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Return the log-probability, rank and `num_top` best alternatives of `targets`, token ids, one for each row of this rank's
    fp32 `logits` [rows, width] (`VocabShard.columns`). A collective of the TP group.

    There are two exchanges: the targets' logits, which only their owners hold; then, in one, what the sum over the vocabulary,
    the targets' ranks and the alternatives need.
    """
    device = logits.device
    wanted = torch.tensor(targets, dtype=torch.int32, device=device).unsqueeze(1)
    of_target = shard.gather([_own_targets(shard, logits, wanted)])[0].amax(dim=0)

    most = min(max(num_top), shard.vocab_size)
    parts = [_local(logits[block], shard.ids, of_target[block], wanted[block]) for block in blocks(logits)]
    sent = [torch.cat(one) for one in zip(*parts, strict=True)]
    peaks, masses, ahead, *top = shard.gather([*sent, *best(logits, shard.ids, most)] if most else sent)

    total = _log_sum(peaks, masses)
    of_targets = _finite(of_target.squeeze(1) - total).tolist()
    ranks = (ahead.sum(dim=0) + 1).tolist()
    tops = _alternatives(top, most, total) if most else [[] for _ in targets]
    return [
        TokenLogprob(token=token, logprob=logprob, rank=rank, top=alternatives[: min(count, most)])
        for token, logprob, rank, alternatives, count in zip(targets, of_targets, ranks, tops, num_top, strict=True)
    ]


def _own_targets(shard: VocabShard, logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the logits of the targets that this rank owns, [rows, 1], and -inf for the others."""
    columns = wanted.to(torch.int64) - shard.own.start
    owned = (columns >= 0) & (columns < len(shard.own))
    return logits.gather(1, columns.clamp(0, shard.width - 1)).masked_fill(~owned, -torch.inf)


def _local(logits: Tensor, ids: Tensor, of_target: Tensor, wanted: Tensor) -> list[Tensor]:
    """Return a rank's part of the scores: best logit, fp64 sum of exp(logit - best), and number of tokens ahead of the target.

    The sum is in fp64, so that the partition of the vocabulary does not affect the fp32 result.
    """
    peak = logits.amax(dim=-1, keepdim=True)
    mass = (logits.double() - torch.where(peak > -torch.inf, peak, 0.0)).exp_().sum(dim=-1)
    ahead = (logits > of_target) | ((logits == of_target) & (ids < wanted))
    return [peak.squeeze(1), mass, ahead.sum(dim=-1)]


def _log_sum(peaks: Tensor, masses: Tensor) -> Tensor:
    """Return the log of the sum of exponentials, [rows] fp64, from the peaks and masses of all ranks [ranks, rows]."""
    highest = peaks.amax(dim=0).double()
    shares = (peaks - highest).exp()
    return highest + (masses * shares).sum(dim=0).log()


def _alternatives(top: list[Tensor], most: int, total: Tensor) -> list[list[tuple[int, float]]]:
    """Return the `most` most likely tokens of each row, by (-logprob, id)."""
    logits, ids = (part.transpose(0, 1).flatten(1) for part in top)
    found = best(logits, ids, most)
    logprobs = _finite(found.logits - total.unsqueeze(1))
    return [list(zip(row, values, strict=True)) for row, values in zip(found.ids.tolist(), logprobs.tolist(), strict=True)]


def _finite(logprobs: Tensor) -> Tensor:
    """Return log-probabilities as fp32 in [FLOOR, 0]."""
    return logprobs.float().nan_to_num(nan=FLOOR, neginf=FLOOR).clamp(FLOOR, 0.0)
