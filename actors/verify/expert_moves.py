"""Expert rebalancing (EPLB) within a test case: the experts move in the middle of the case, and back at its end.

plans       prompt  decode  decode │ decode  decode  decode │ (no rows)
expert map  first                  │ second                 │ first
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
    """Returns `case` with moves of the experts of every MoE layer of `spec` to the expert map for random loads in its middle
    plan, and back in one more plan without rows at its end.

    The case is unchanged if the model has no experts, `layout` has no expert parallelism, or there are fewer than two plans.
    """
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
    """Returns the moves from one expert map to another, layer by layer."""
    transfers: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(layers))}
    for each in moves(old, new):
        transfers[each.layer].append((each.source_slot, each.target_slot))
    return [
        ExpertMove(layer=layers[index], experts=list(new.experts[index]), transfers=found)
        for index, found in transfers.items()
        if found
    ]
