"""Rounding or fault: the numerical tolerances of a verification, and the verdict on one case.

float32    Logits must agree within 1e-4, or within 1e-5 of the largest logit if that is larger. A different order of summation
           changes the last bits of a value, so an absolute bound is too strict for models with logits in the hundreds.
bfloat16   Logits may differ from one rank in float32 by at most twice the error of one rank in bfloat16, plus 1e-2.

Greedy tokens must be equal wherever the margin between the two best logits exceeds ten times the observed error. To find the
first layer that departs, hidden states are compared within 1e-3 of their token's largest value (float32), or by the bfloat16
rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actors.verify.cases import Case, sampled_keys, text_of
from actors.verify.ranks import Ran
from actors.verify.recorder import EMBEDDING
from actors.verify.reference import Distance, Reference
from actors.verify.report import CaseReport, Departure, Disagreement
from actors.wire.results import StepResult

_ABSOLUTE = 1e-4
_OF_LARGEST = 1e-5
_LAYER = 1e-3
_MARGIN = 10.0


@dataclass(frozen=True)
class Tolerance:
    """The error bounds for one dtype on one model.

    `logits` is absolute, `layers` are the relative bounds of the hidden states by layer, and `text` explains the bounds.
    """

    dtype: str
    logits: float
    layers: dict[int, float]
    text: str


def float32_tolerance(reference: Reference) -> Tolerance:
    """Returns the float32 tolerance: for logits the larger of 1e-4 and 1e-5 of the largest logit of `reference`, and 1e-3
    (relative) for hidden states."""
    largest = reference.largest_logit
    bound = max(_ABSOLUTE, _OF_LARGEST * largest)
    text = f"float32: the larger of 1e-4 and 1e-5 of the largest logit ({largest:.4g})"
    return Tolerance("float32", bound, dict.fromkeys(reference.hidden, _LAYER), text)


def bfloat16_tolerance(one_rank: Distance) -> Tolerance:
    """Returns the bfloat16 tolerance: twice the error `one_rank`, the distance of one rank in bfloat16 from one rank in
    float32, plus 1e-2, for the logits and for each layer."""
    text = f"bfloat16: twice the error of one rank against float32 ({one_rank.logits:.4g}) plus 1e-2"
    layers = {layer: 2 * error + 1e-2 for layer, error in one_rank.layers.items()}
    return Tolerance("bfloat16", 2 * one_rank.logits + 1e-2, layers, text)


def certain_choices(reference: Reference, tolerance: Tolerance) -> set[tuple[int, int]]:
    """Returns the set of (index of the text, position) after which the greedy token of `reference` is clear even at an error as
    large as `tolerance`: the two best logits differ by more than ten times that of the logits."""
    best = torch.topk(reference.logits, 2, -1).values
    clear = iter((best[:, 0] - best[:, 1] > _MARGIN * tolerance.logits).tolist())
    return {
        (index, position) for index, text in enumerate(reference.texts) for position in range(len(text.tokens)) if next(clear)
    }


def judge(case: Case, reference: Reference, tolerance: Tolerance, ran: Ran, found: Distance, repeats: bool) -> CaseReport:
    """Returns the verdict on `case` with its measurements: ``fault`` if an error exceeds `tolerance`, a clear greedy token
    differs, a value or token is missing, or `repeats` is False; else ``rounding``.

    `ran` is the outcome of the case on the ranks, `found` its distance from `reference`, and `repeats` whether a second run
    gave the same bits.
    """
    choices = _choices(case, reference, ran.results, found.logits)
    wrong = tuple(each for each in choices.clear if each.token != each.expected)
    faults = list(found.faults)
    if len(choices.given) != choices.planned:
        faults.append(f"{choices.planned} tokens were to be sampled, {len(choices.given)} were")
    too_far = found.logits > tolerance.logits or found.logprobs > 2 * tolerance.logits
    fault = too_far or bool(wrong) or bool(faults) or not repeats
    return CaseReport(
        name=case.name,
        dtype=tolerance.dtype,
        verdict="fault" if fault else "rounding",
        max_abs_error=found.logits,
        max_logprob_error=found.logprobs,
        tolerance=tolerance.logits,
        sampled=len(choices.given),
        clear=len(choices.clear),
        greedy_match=not wrong,
        disagreements=wrong[:10],
        repeats=repeats,
        departs=_first_departure(found, tolerance, reference) if fault else None,
        faults=tuple(faults[:10]),
    )


@dataclass(frozen=True)
class _Choices:
    planned: int
    given: list[int]
    clear: list[Disagreement]
    """Choices whose margin exceeds ten times the error, including the correct ones."""


def _choices(case: Case, reference: Reference, results: Sequence[StepResult], error: float) -> _Choices:
    keys = sampled_keys(case.plans)
    # DP ranks return results in their own order, not in the order of the plan.
    found = [{each.sequence_id: each for each in result.sampled} for result in results]
    order = [(step, row.sequence_id) for step, plan in enumerate(case.plans) for row in plan.rows if row.sample]
    sampled = [found[step][sequence] for step, sequence in order if sequence in found[step]]
    if not keys or len(sampled) != len(keys):
        return _Choices(len(keys), [each.token for each in sampled], [])
    best = torch.topk(reference.logits[reference.rows(keys)], 2, -1)
    margins = (best.values[:, 0] - best.values[:, 1]).tolist()
    clear = [
        Disagreement(text=text_of(key[0], reference.texts), position=key[1], token=each.token, expected=expected, margin=margin)
        for key, each, expected, margin in zip(keys, sampled, best.indices[:, 0].tolist(), margins, strict=True)
        if margin > _MARGIN * error or each.error is not None
    ]
    return _Choices(len(keys), [each.token for each in sampled], clear)


def _first_departure(found: Distance, tolerance: Tolerance, reference: Reference) -> Departure | None:
    for layer, error in sorted(found.layers.items()):
        if error > tolerance.layers[layer]:
            rank, (sequence, position) = found.worst[layer]
            return Departure(
                layer="embedding" if layer == EMBEDDING else layer,
                error=error,
                bound=tolerance.layers[layer],
                world_rank=rank,
                text=text_of(sequence, reference.texts),
                position=position,
            )
    if found.logits > tolerance.logits:
        return Departure(layer="head", error=found.logits, bound=tolerance.logits)
    return None
