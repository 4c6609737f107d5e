"""What a verification found, as values: printed by the command, and its ``--json``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Verdict = Literal["rounding", "fault"]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Departure(_Value):
    """Where a layout first differs by more than rounding. `layer`: as numbered in the model, or ``embedding`` or ``head``
    (what follows the last layer: norm, head, sampler)."""

    layer: int | Literal["embedding", "head"]
    error: float
    """Of a layer: largest difference of a token's hidden state, relative to its largest value. Of the head: of logits."""
    bound: float
    world_rank: int | None = None
    text: int | None = None
    """Which of the texts, and which token of it."""
    position: int | None = None


class Disagreement(_Value):
    """A greedy token that is not the one of one rank although the margin says that it should be."""

    text: int
    position: int
    token: int
    expected: int
    margin: float


class CaseReport(_Value):
    """One case under one dtype."""

    name: str
    dtype: str
    verdict: Verdict
    max_abs_error: float
    """Of logits."""
    max_logprob_error: float
    tolerance: float
    sampled: int
    """Greedy choices made."""
    clear: int
    """Of them, those whose top-2 margin exceeds ten times the observed error."""
    greedy_match: bool
    """Every clear choice is that of one rank."""
    disagreements: tuple[Disagreement, ...] = ()
    repeats: bool
    """A second run of the layout gave the same bits."""
    departs: Departure | None = None
    faults: tuple[str, ...] = ()


class Report(_Value):
    """The whole verification. The values of the top level are those of the asked dtype."""

    model: str
    layout: str
    dtype: str
    ranks: Literal["threads", "processes"]
    verdict: Verdict
    max_abs_error: float
    tolerance: float
    tolerance_from: str
    """Where the tolerance comes from, in words and numbers."""
    routes: str | None = None
    """Who chose the experts of each token in these cases, in words; None where the model has no experts."""
    one_rank_error: float | None = None
    """bfloat16: error of one rank against one rank in float32."""
    greedy_match: bool
    departs: Departure | None = None
    """That of the first case that is a fault. None there: all layers agree, and the tokens chosen are at fault."""
    largest_logit: float
    prompts: tuple[int, ...]
    """Lengths in tokens."""
    generated: int
    """Tokens that follow each prompt."""
    cases: tuple[CaseReport, ...]
    notes: tuple[str, ...] = ()
    """What these prompts did not exercise."""
    seconds: float
