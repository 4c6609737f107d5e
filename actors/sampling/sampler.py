"""The sampler: from logits to tokens, identical on every rank of a TP group and under every layout.

    logits ──────────────────────────────────────────────→ logprobs (of the raw logits, over the true vocabulary)
       └→ bias → penalties → min_tokens → temperature → top-k → top-p → min-p → + noise → the largest

The TP group is that of one DP rank (attn_dp): DP ranks sample their own rows and do not wait for each other. No rank gathers
full logits if less is exact (see `actors.sampling.kinds`). In the common cases a step is one all-gather of a few bytes a row;
there is one more if a row has min-p without top-k or top-p, and two more if rows request logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.groups.group import Group
from actors.sampling import scores
from actors.sampling.edits import edit
from actors.sampling.kinds import kinds
from actors.sampling.rows import SampleResult, SampleRow, is_edited
from actors.sampling.shard import VocabShard
from actors.wire.requests import TokenLogprob

__all__ = ["SampleResult", "SampleRow", "Sampler"]


class Sampler:
    """Samples and scores from one rank's slice of the logits. All ranks of `tp` must make the same calls in the same order."""

    def __init__(self, tp: Group, vocab: range, vocab_size: int, device: torch.device | str = "cpu") -> None:
        """Exchange the vocabulary ranges of the ranks. A collective of the TP group.

        `vocab` are this rank's rows of the padded vocabulary (`placement.ownership.shards.vocabulary`); it may extend past
        `vocab_size`.
        """
        self._shard = VocabShard(tp, vocab, vocab_size, torch.device(device))

    @property
    def vocab_columns(self) -> int:
        """Number of vocabulary columns of the widest rank: equal on all ranks of the TP group."""
        return int(self._shard.width)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampleResult]:
        """Return the next token of each of `rows`, in their order, from this rank's fp32 `logits` [rows, len(vocab)], which are
        not changed. A collective of the TP group: every rank gets the same result.

        Log-probabilities, if requested, are those of the raw logits: before bias, penalties, temperature and filters. Among
        equal logits the lowest id is chosen. A row without a possible token gets `SampleResult.error`, and the other rows their
        tokens.
        """
        if not rows:
            return []
        columns = self._shard.columns(logits)
        tokens, errors = self._choose(self._edited(columns, rows), rows)
        choices = [SampleResult(token, None, error) for token, error in zip(tokens, errors, strict=True)]
        wanted = [at for at, row in enumerate(rows) if row.sampling.logprobs is not None]
        if wanted:
            num_top = [rows[at].sampling.logprobs or 0 for at in wanted]
            found = scores.score(self._shard, _take(columns, wanted), [tokens[at] for at in wanted], num_top)
            for at, logprob in zip(wanted, found, strict=True):
                choices[at] = choices[at] if errors[at] else SampleResult(tokens[at], logprob)
        return choices

    def score(self, logits: Tensor, targets: Sequence[int], num_top: Sequence[int] | int) -> list[TokenLogprob]:
        """Return the log-probability (natural) and rank of each row's target token id under raw `logits` [rows, len(vocab)]
        fp32, with the most likely alternatives. A collective of the TP group.

        `num_top` is the number of alternatives (of all rows, or of each), which are sorted by (-logprob, id); at most
        `vocab_size` are returned. Values are finite: an impossible token has -9999.
        """
        if not targets:
            return []
        counts = [num_top] * len(targets) if isinstance(num_top, int) else num_top
        return scores.score(self._shard, self._shard.columns(logits), targets, counts)

    def _edited(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Return the logits after bias, penalties and masks: a copy if any row has some."""
        changed = [at for at, row in enumerate(rows) if is_edited(row)]
        if not changed:
            return logits
        logits = logits.clone()
        for at in changed:
            edit(logits[at], rows[at], self._shard.own)
        return logits

    def _choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[str | None]]:
        groups = list(kinds(self._shard, rows))
        sent = [group.send(_take(logits, group.index)) for group in groups]
        gathered = iter(self._shard.gather([part for parts in sent for part in parts]))
        tokens: list[int] = [0] * len(rows)
        errors: list[str | None] = [None] * len(rows)
        for group, parts in zip(groups, sent, strict=True):
            ids, proof = group.choose([next(gathered) for _ in parts])
            for at, token, value in zip(group.index, ids.tolist(), proof.tolist(), strict=True):
                errors[at] = _fault(value)
                tokens[at] = 0 if errors[at] else token
        return tokens, errors


def _take(logits: Tensor, index: list[int]) -> Tensor:
    """Return the rows of `index`, without a copy if these are all rows."""
    return logits if len(index) == logits.shape[0] else logits[index]


def _fault(value: float) -> str | None:
    """Return what is wrong with a choice whose best score is `value`, or None."""
    if value - value == 0:
        return None
    if value == -torch.inf:
        return "no token can be chosen: every logit is -inf (after logit_bias and the min_tokens mask)"
    return f"the model's logits are not finite: the largest is {value} (NaN counts as inf)"
