"""The reference values of one rank for every token of every text, and the distance of recorded values from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from actors.verify.cases import Key, Text, planned_keys, sampled_keys, text_of
from actors.verify.ranks import Ran
from actors.wire.plans import StepPlan
from actors.wire.results import StepResult
from placement.ownership.shard import Shard


@dataclass(frozen=True)
class Reference:
    """The values of a plain run on one rank, one row per token of all texts, concatenated.

    `hidden` is [tokens, hidden] by layer, and `logits` is [tokens, vocab].
    """

    texts: Sequence[Text]
    hidden: dict[int, Tensor]
    logits: Tensor

    def rows(self, keys: Sequence[Key]) -> Tensor:
        """Returns the row in `hidden` and `logits` of each (sequence id, position) of `keys`, [keys] int64."""
        starts = list(accumulate((len(text.tokens) for text in self.texts), initial=0))
        return torch.tensor([starts[text_of(sequence, self.texts)] + position for sequence, position in keys])

    @property
    def largest_logit(self) -> float:
        """The largest absolute value of all logits."""
        return float(self.logits.abs().max())


@dataclass
class Distance:
    """The distance of a run from a reference.

    Errors are largest absolute differences. Those of hidden states are relative to the token's largest hidden value. An error
    is infinite if a value is not finite.
    """

    logits: float = 0.0
    logprobs: float = 0.0
    layers: dict[int, float] = field(default_factory=dict)
    worst: dict[int, tuple[int, Key]] = field(default_factory=dict)
    """(world rank, key) of the worst hidden state of each layer."""
    faults: list[str] = field(default_factory=list)
    """Errors regardless of the tolerance: values that are missing, padding ids that could be sampled."""


def reference_of(ran: Ran, texts: Sequence[Text], vocab_size: int) -> Reference:
    """Returns the reference from `ran`, a run of `cases.plain` of `texts` on one rank. Logits are cut to `vocab_size`, without
    padding. Tokens that were not run have NaN."""
    empty = Reference(texts, {}, torch.empty(0))
    tokens = sum(len(text.tokens) for text in texts)
    hidden: dict[int, Tensor] = {}
    logits = torch.full((tokens, vocab_size), torch.nan)
    for record in ran.records[0]:
        rows = empty.rows(record.keys)
        for layer, values in record.hidden.items():
            hidden.setdefault(layer, torch.full((tokens, values.shape[1]), torch.nan))[rows] = values
        for keys, values in record.logits:
            logits[empty.rows(keys)] = values[:, :vocab_size]
    return Reference(texts, hidden, logits)


def distance(ran: Ran, plans: Sequence[StepPlan], reference: Reference, shards: Sequence[Shard]) -> Distance:
    """Returns the distance of the values of all ranks in `ran`, a run of `plans`, from `reference`. `shards` are the model
    shards by world rank, which say whose logits a rank has. Missing values and padding that could be sampled are listed as
    faults."""
    found = Distance()
    wanted = _Coverage(reference, plans)
    for rank, (records, own) in enumerate(zip(ran.records, shards, strict=True)):
        for record in records:
            for layer, values in record.hidden.items():
                _compare_hidden(found, reference, rank, layer, record.keys, values)
                wanted.saw_hidden(layer, record.keys)
            for keys, values in record.logits:
                _compare_logits(found, reference, rank, own, keys, values)
                wanted.saw_logits(own, keys)
    found.faults += wanted.missing()
    _compare_logprobs(found, reference, ran.results)
    return found


def _compare_hidden(found: Distance, reference: Reference, rank: int, layer: int, keys: Sequence[Key], values: Tensor) -> None:
    if len(keys) != values.shape[0]:
        found.faults.append(f"rank {rank}: layer {layer} returned {values.shape[0]} rows for {len(keys)} tokens")
        return
    if not keys:
        return
    expected = reference.hidden[layer][reference.rows(keys)]
    errors = (values - expected).abs().amax(1) / expected.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
    errors = errors.nan_to_num(torch.inf)
    error, at = float(errors.max()), int(errors.argmax())
    if error >= found.layers.get(layer, -1.0):
        found.layers[layer], found.worst[layer] = error, (rank, keys[at])


def _compare_logits(found: Distance, reference: Reference, rank: int, own: Shard, keys: Sequence[Key], values: Tensor) -> None:
    vocab = reference.logits.shape[1]
    real = max(0, min(own.head_vocab.stop, vocab) - own.head_vocab.start)
    expected = reference.logits[reference.rows(keys), own.head_vocab.start : own.head_vocab.start + real]
    if real:
        found.logits = max(found.logits, float((values[:, :real] - expected).abs().nan_to_num(torch.inf).max()))
    if not torch.isneginf(values[:, real:]).all():
        found.faults.append(f"rank {rank}: logits of padding ids past {vocab} are not -inf, so they could be sampled")


def _compare_logprobs(found: Distance, reference: Reference, results: Sequence[StepResult]) -> None:
    """Compare the prompt log-probabilities that the output ranks have returned."""
    for result in results:
        for scored in result.prompt_logprobs:
            keys = [(scored.sequence_id, scored.first - 1 + at) for at in range(len(scored.entries))]
            tokens = torch.tensor([entry.token for entry in scored.entries])
            given = torch.tensor([entry.logprob for entry in scored.entries])
            expected = torch.log_softmax(reference.logits[reference.rows(keys)], -1).gather(1, tokens[:, None])[:, 0]
            found.logprobs = max(found.logprobs, float((given - expected).abs().nan_to_num(torch.inf).max()))


class _Coverage:
    """Tracks which values have been compared, so that a token that a rank dropped does not count as one that agrees."""

    def __init__(self, reference: Reference, plans: Sequence[StepPlan]) -> None:
        self._tokens = planned_keys(plans)
        self._hidden: dict[int, set[Key]] = {layer: set() for layer in reference.hidden}
        self._vocab: dict[Key, set[range]] = {key: set() for key in sampled_keys(plans)}
        self._size = reference.logits.shape[1]

    def saw_hidden(self, layer: int, keys: Sequence[Key]) -> None:
        """Mark the hidden states of the tokens `keys` after `layer` (`EMBEDDING` or a layer number) as compared."""
        self._hidden[layer].update(keys)

    def saw_logits(self, own: Shard, keys: Sequence[Key]) -> None:
        """Mark the logits of the tokens `keys` in the vocabulary range of the shard `own` as compared."""
        for key in keys:
            if key in self._vocab:
                self._vocab[key].add(own.head_vocab)

    def missing(self) -> list[str]:
        """Returns one line of text for each layer and each sampled token with values that no rank has provided."""
        faults = []
        for layer, seen in self._hidden.items():
            if lost := self._tokens - seen:
                faults.append(f"layer {layer}: {len(lost)} of {len(self._tokens)} tokens are on no rank")
        for (sequence, position), parts in self._vocab.items():
            seen_ids = sum(max(0, min(part.stop, self._size) - part.start) for part in parts)
            if seen_ids != self._size:
                faults.append(f"sequence {sequence}, position {position}: {seen_ids} of {self._size} ids have logits")
        return faults
