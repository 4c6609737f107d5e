"""The counters of tokens on their way to experts equal `placement.cost.traffic`, given what the routers did."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace

import pytest
from torch import Tensor

from actors.model.moe.dispatch import AllToAllDispatcher
from actors.wire.plans import Row, StepPlan
from placement.cost.expert_traffic import DispatchTraffic, Routed
from placement.cost.step_shape import RowShape, StepShape
from placement.cost.traffic import counters, rank_traffic
from placement.layout import sequence_parallel
from placement.layout.layout import Layout
from placement.layout.mesh import coords_of, groups, talking_axes
from placement.legality.check import check
from placement.ownership.shards import shard
from tests.cpu.layouts.test_traffic_counters import Counted, blocks_of, counted, start
from tests.support.long_cases import long
from tests.support.models.tiny_models import TinyModel, tiny

LAYOUTS = [
    ("mixtral", "tp=4,ep=4"),
    ("qwen2_moe", "tp=4,ep=2,sp=true"),
    ("qwen3_moe", "cp=2,tp=2,ep=4"),
    ("glm4_moe", "cp=2,tp=2,pp=2,ep=2,sp=true"),
    ("gpt_oss", "cp=3,ep=3"),
    ("mimo_v2", "cp=2,tp=3,pp=2,ep=2"),
    ("mimo_v2", "tp=8,dcp=2,ep=4"),
    ("qwen2_moe", "tp=4,moe_dp=2,ep=2"),
    ("mixtral", "cp=2,tp=2,moe_dp=2"),
    ("qwen2_moe", "attn_dp=2,tp=2,ep=4"),
    ("glm4_moe", "attn_dp=4,ep=4,redundant_experts=3"),
    ("qwen3_moe", "attn_dp=3,tp=2,sp=true,moe_dp=3,ep=2,pp=2"),
    ("mixtral", "attn_dp=2,cp=2,ep=2,moe_tp=2"),
    ("qwen2_moe", "attn_dp=3,tp=2,ep=6,lm_head=stage"),
    ("glm4_moe", "attn_dp=2,cp=2,tp=2,pp=2,ep=4,lm_head=stage"),
]
WAYS = ("gather", "a2a")
CASES = [(*case, WAYS[at % 2]) for at, case in enumerate(LAYOUTS)]
MORE = [(*case, WAYS[(at + 1) % 2]) for at, case in enumerate(LAYOUTS)]
"""The other way of each layout."""
STEPS = [
    (RowShape(9), RowShape(11, choosing=None)),
    (RowShape(1, 9), RowShape(6, 11, choosing=None), RowShape(2)),
    (RowShape(1, 10), RowShape(13, 17)),
]
PLANS = [
    StepPlan(
        step=0,
        started=[start(0, 9), start(1, 30), start(2, 2)],
        rows=[
            Row(sequence_id=0, start=0, count=9, new_blocks=blocks_of(0), sample=True),
            Row(sequence_id=1, start=0, count=11, new_blocks=[*blocks_of(1), 30, 31]),
        ],
    ),
    StepPlan(
        step=1,
        rows=[
            Row(sequence_id=0, start=9, count=1, append=[5], sample=True),
            Row(sequence_id=1, start=11, count=6),
            Row(sequence_id=2, start=0, count=2, new_blocks=blocks_of(2), sample=True),
        ],
    ),
    StepPlan(
        step=2,
        rows=[
            Row(sequence_id=0, start=10, count=1, append=[8], sample=True),
            Row(sequence_id=1, start=17, count=13, sample=True),
        ],
    ),
]


@pytest.mark.parametrize(("family", "text", "dispatch"), [*CASES, *long(*MORE)])
def test_the_counters_are_the_traffic(family: str, text: str, dispatch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_parallel, "TOKENS_PER_RANK", 6)
    routed: dict[str, list[Routed]] = defaultdict(list)
    right = AllToAllDispatcher.counts

    def noted(self: AllToAllDispatcher, sent_to: Tensor) -> tuple[list[int], list[int]]:
        send, receive = right(self, sent_to)
        routed[threading.current_thread().name].append(Routed(sum(send), send[self._copy.rank], sum(receive)))
        return send, receive

    monkeypatch.setattr(AllToAllDispatcher, "counts", noted)
    model, layout = tiny(family), Layout.parse(f"{text},dispatch={dispatch}")
    assert check(layout, model.spec) == []
    plans, shapes = in_dp_ranks(layout.attn_dp)
    found = counted(model, layout, plans)
    assert bool(routed) == (dispatch == "a2a")
    assert found == [expected(model, layout, rank, shapes, routed[f"rank {rank} of {layout}"]) for rank in range(layout.world)]


def in_dp_ranks(dp_size: int) -> tuple[list[StepPlan], list[tuple[RowShape, ...]]]:
    """The plans with their sequences split over DP ranks, some of which are idle then in some steps; and what they are to
    run."""
    plans = [
        plan.model_copy(
            update={
                "started": [begin.model_copy(update={"dp_rank": begin.sequence_id % dp_size}) for begin in plan.started],
                "rows": [row.model_copy(update={"dp_rank": row.sequence_id % dp_size}) for row in plan.rows],
            }
        )
        for plan in PLANS
    ]
    shapes = [
        tuple(replace(shape, dp_rank=row.dp_rank) for shape, row in zip(rows, plan.rows, strict=True))
        for rows, plan in zip(STEPS, plans, strict=True)
    ]
    return plans, shapes


def expected(model: TinyModel, layout: Layout, rank: int, shapes: list[tuple[RowShape, ...]], routed: list[Routed]) -> Counted:
    """What one rank counts; `routed` are its layers, step after step."""
    entries = []
    coords = coords_of(layout, rank)
    for rows in shapes:
        step = StepShape(rows, "float32", block_size=4)
        layers = DispatchTraffic(model.spec, layout, coords, shard(model.spec, layout, coords), step).num_calls
        entries += rank_traffic(model.spec, layout, rank, step, [routed.pop(0) for _ in range(layers)] if routed else None)
    assert routed == []
    return {axis: counters(entries, axis) for axis in talking_axes(model.spec, layout) if len(groups(layout, axis)[0]) > 1}
