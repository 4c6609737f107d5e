"""Pipeline micro-batches: the rules that split the work of a DP rank into plans so that all pipeline stages are busy.

The drawing shows two stages and decodes in two micro-batches, with one plan waiting. A sampled token goes from the last stage
to the first directly, without a round trip through the engine::

    stage 0   A1 B1 A2 B2 A3        maximum in flight: one plan for each stage, and one that waits at the first stage
    stage 1      A1 B1 A2 B2

**Decodes** are split into as many micro-batches as there are stages, but none is smaller than `rows` rows: below that size the
cost of a step is that of reading the weights and of its overhead, which every additional micro-batch pays again.

**Prompts** are split so that a stage has the next chunk while its successor runs the previous one. The prompt tokens in sight
are divided into `_CHUNKS` chunks for each stage, which keeps the bubble of filling and draining, ``(P-1)/(M+P-1)`` of the time
with M chunks, under a fifth. A chunk has at least `tokens` tokens, so that a step is worth the cost of reading the weights.

**One step ahead.** A sequence may be planned while its last token is still being sampled, but never while two are.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from actors.engine.sequences.sequence import Sequence

_CHUNKS = 4
"""Number of chunks per stage into which the prompt tokens in sight are split."""


def num_micro_batches(decoding: int, stages: int, rows: int) -> int:
    """Return the number of micro-batches into which `decoding` sequences are split: at most one for each of the pipeline
    `stages`, none smaller than `rows` sequences, and at least one."""
    return min(stages, max(1, decoding // rows))


def next_decodes(decoding: Several[Sequence], step: int, stages: int, rows: int) -> list[Sequence]:
    """Return the sequences of `decoding` that go into plan number `step`, in the order of `decoding` (most urgent first).

    With M micro-batches (`num_micro_batches`) a plan takes one M-th of the sequences, preferring those whose last step is
    oldest. It takes none whose token is being sampled by one of the previous M - 1 plans, which are still in the stages.
    """
    parts = num_micro_batches(len(decoding), stages, rows)
    ready = [s for s in decoding if s.num_awaited == 0 or (s.num_awaited == 1 and step - s.last_step >= parts)]
    share = -(-len(decoding) // parts)
    if len(ready) <= share:
        return ready
    chosen = set(sorted(range(len(ready)), key=lambda at: ready[at].last_step)[:share])
    return [sequence for at, sequence in enumerate(ready) if at in chosen]


def prompt_tokens(pending_tokens: int, stages: int, tokens: int) -> int | None:
    """Return the maximum number of prompt tokens of one step; None for no limit (a single stage).

    `pending_tokens` is the number of prompt tokens that are running or queued, `stages` that of pipeline stages, and `tokens`
    the least limit.
    """
    return None if stages == 1 else max(tokens, -(-pending_tokens // (_CHUNKS * stages)))
