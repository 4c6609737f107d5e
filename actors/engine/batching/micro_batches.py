"""How the work of a DP rank is cut into plans so that all pipeline stages are busy: pure rules, each stated with its reason.

Two stages, decodes in two micro-batches, one plan waiting; a token goes from the last stage to the first past the engine::

    stage 0   A1 B1 A2 B2 A3        in flight at most: a plan for each stage, and one that waits at the first
    stage 1      A1 B1 A2 B2

**Decodes** are split over as many micro-batches as there are stages, but none is made smaller than `rows` rows: below that
a step costs what its weights and its overhead cost, which a split pays again for every part.

**Prompts** are cut so that a stage has the next chunk while its successor works on the last: a step takes a `_CHUNKS`-th
of the prompt tokens in sight for each stage, which keeps fill and drain, ``(P-1)/(M+P-1)`` of the time with M chunks,
under a fifth; but no less than `tokens`, from which on a step is worth its weights.

**One step ahead.** A sequence may be planned while its last token is still being sampled, never while two are.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from actors.engine.sequences.sequence import Sequence

_CHUNKS = 4
"""Chunks per stage that the prompts in sight are cut into."""


def num_micro_batches(decoding: int, stages: int, rows: int) -> int:
    """Micro-batches over which `decoding` sequences are split: at most one a stage, at least `rows` sequences in each."""
    return min(stages, max(1, decoding // rows))


def next_decodes(decoding: Several[Sequence], step: int, stages: int, rows: int) -> list[Sequence]:
    """Those of the sequences with one token to run that go into plan `step`, most urgent first (as they come).

    With M micro-batches: a M-th of them; none whose token is being sampled by one of the M - 1 plans before, since that plan
    is still in the stages; those not run for longest first.
    """
    parts = num_micro_batches(len(decoding), stages, rows)
    ready = [s for s in decoding if s.num_awaited == 0 or (s.num_awaited == 1 and step - s.last_step >= parts)]
    share = -(-len(decoding) // parts)
    if len(ready) <= share:
        return ready
    chosen = set(sorted(range(len(ready)), key=lambda at: ready[at].last_step)[:share])
    return [sequence for at, sequence in enumerate(ready) if at in chosen]


def prompt_tokens(in_sight: int, stages: int, tokens: int) -> int | None:
    """Prompt tokens a step takes at most, with `in_sight` of them waiting to be run; None: as many as fit."""
    return None if stages == 1 else max(tokens, -(-in_sight // (_CHUNKS * stages)))
