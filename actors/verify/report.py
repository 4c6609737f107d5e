"""The report of a verification: the values that the ``verify`` command prints and writes with ``--json``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Verdict = Literal["rounding", "fault"]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Departure(_Value):
    """The place where a layout first differs by more than rounding.

    `layer` is the layer's number in the model, or ``embedding``, or ``head`` (everything after the last layer: norm, head,
    sampler).
    """

    layer: int | Literal["embedding", "head"]
    error: float
    """For a layer, the largest difference of a token's hidden state, relative to its largest value. For the head, the largest
    difference of the logits."""
    bound: float
    world_rank: int | None = None
    text: int | None = None
    """Index of the text, of which `position` is the token."""
    position: int | None = None


class Disagreement(_Value):
    """A greedy token that differs from the one that a single rank chooses, although the margin rules out rounding."""

    text: int
    position: int
    token: int
    expected: int
    margin: float


class CaseReport(_Value):
    """The result of one case in one dtype."""

    name: str
    dtype: str
    verdict: Verdict
    max_abs_error: float
    """Largest absolute error of the logits."""
    max_logprob_error: float
    tolerance: float
    sampled: int
    """Number of greedy choices."""
    clear: int
    """Number of greedy choices whose top-2 margin exceeds ten times the observed error."""
    greedy_match: bool
    """Whether every clear choice is equal to that of one rank."""
    disagreements: tuple[Disagreement, ...] = ()
    repeats: bool
    """Whether a second run of the layout gave bit-identical values."""
    departs: Departure | None = None
    faults: tuple[str, ...] = ()


class Report(_Value):
    """The report of a whole verification. The values at the top level are those of the requested dtype."""

    model: str
    layout: str
    dtype: str
    ranks: Literal["threads", "processes"]
    verdict: Verdict
    max_abs_error: float
    tolerance: float
    tolerance_from: str
    """The derivation of the tolerance, in words and numbers."""
    routes: str | None = None
    """Explains whether ranks routed tokens to experts themselves or replayed given routes; None if the model has no experts."""
    one_rank_error: float | None = None
    """For bfloat16, the error of one rank against one rank in float32."""
    greedy_match: bool
    departs: Departure | None = None
    """The departure of the first case whose verdict is a fault. None for such a case means that all layers agree within the
    tolerance, and the fault lies elsewhere, such as in the chosen tokens."""
    largest_logit: float
    prompts: tuple[int, ...]
    """Lengths of the prompts in tokens."""
    generated: int
    """Number of tokens generated after each prompt."""
    cases: tuple[CaseReport, ...]
    notes: tuple[str, ...] = ()
    """Features of the layout that these prompts did not exercise."""
    seconds: float
