"""Experts that move in the middle of a case, and back at its end, as the live balancer has them do.

plans   prompt  decode  decode │ decode  decode  decode │ (no rows)
map     first                  │ another one            │ first
"""

from __future__ import annotations

import random
from dataclasses import replace

from actors.verify.cases import Case
from actors.wire.experts import ExpertMove
from actors.wire.plans import StepPlan
from placement.experts.expert_map import ExpertMap, map_of, place
from placement.experts.moves import moves
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec


def with_moves(case: Case, spec: ModelSpec, layout: Layout) -> Case:
    """The case with moves of every layer with experts to a map of random loads; unchanged where experts have nowhere to go."""
    if spec.moe is None or layout.ep == 1 or len(case.plans) < 2:
        return case
    layers = spec.moe.layers
    old = map_of(spec.moe, layout)
    first = replace(old, experts=old.experts * len(layers))
    draw = random.Random(len(case.plans))
    loads = [[draw.paretovariate(1.2) for _ in range(spec.moe.num_experts)] for _ in layers]
    other = place(loads, layout.ep, layout.redundant_experts)
    plans, middle = list(case.plans), len(case.plans) // 2
    plans[middle] = plans[middle].model_copy(update={"moves": _moves(first, other, layers)})
    plans.append(StepPlan(step=len(plans), rows=[], moves=_moves(other, first, layers)))
    return replace(case, plans=tuple(plans))


def _moves(old: ExpertMap, new: ExpertMap, layers: tuple[int, ...]) -> list[ExpertMove]:
    """From one map to another, layer by layer."""
    transfers: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(layers))}
    for each in moves(old, new):
        transfers[each.layer].append((each.source_slot, each.target_slot))
    return [
        ExpertMove(layer=layers[index], experts=list(new.experts[index]), transfers=found)
        for index, found in transfers.items()
        if found
    ]
