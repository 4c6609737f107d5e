"""The counters of the groups after a real step equal `placement.cost.traffic`, rank by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from actors.groups.group import Group
from actors.groups.thread import run_ranks, thread_groups
from actors.rank.assembly import Parts
from actors.rank.runner import Runner
from actors.rank.threads import ThreadRanks
from actors.sampling.sampler import Sampler
from actors.wire.plans import Row, SequenceStart, StepPlan
from actors.wire.requests import SamplingParams
from placement.cost.step_shape import Choosing, RowShape, StepShape
from placement.cost.traffic import counters, rank_traffic
from placement.layout import sequence_parallel
from placement.layout.layout import Layout
from placement.layout.mesh import groups, talking_axes
from placement.legality.check import check
from tests.support.inprocess import rank_config
from tests.support.long_cases import long
from tests.support.models.tiny_models import TinyModel, tiny

torch.set_num_threads(1)

LAYOUTS = [
    *(f"tp={tp}" for tp in range(1, 6)),
    *(f"pp={pp}" for pp in (2, 3)),
    *("tp=2,pp=2", "tp=3,pp=2", "tp=5,pp=3", "tp=4,pp=2,stage_layers=1/3", "tp=3,tp_shares=5/2/1", "tp=2,pp=2,tp_shares=1/3"),
    *("tp=2,sp=true", "tp=3,pp=2,sp=true"),
    *("cp=2", "cp=3,cp_style=allgather", "cp=2,pp=2", "tp=4,dcp=2", "cp=2,tp=4,dcp=2", "cp=2,tp=2,sp=true"),
    *("attn_dp=2,tp=2", "attn_dp=2,tp=3,pp=2", "attn_dp=2,cp=2", "attn_dp=3,tp=2,sp=true"),
    *("attn_dp=2,tp=2,lm_head=stage", "attn_dp=3,cp=2,tp=2,sp=true,lm_head=stage", "attn_dp=2,pp=2,lm_head=stage"),
]
"""The tiny models have 6 query heads in 2 KV groups, 4 layers and 101 tokens: nothing divides."""

HEATED = SamplingParams(seed=3)
KINDS = {
    "noisy": (HEATED, Choosing(greedy=False)),
    "min_p": (HEATED.model_copy(update={"min_p": 0.1}), Choosing(greedy=False, min_p=0.1)),
    "top_k": (HEATED.model_copy(update={"top_k": 7}), Choosing(greedy=False, top_k=7)),
    "large_top_k": (HEATED.model_copy(update={"top_k": 90}), Choosing(greedy=False, top_k=90)),
    "top_p": (HEATED.model_copy(update={"top_p": 0.9}), Choosing(greedy=False, top_p=0.9)),
    "logprobs": (SamplingParams(temperature=0.0, logprobs=4), Choosing(logprobs=4)),
    "many_logprobs": (SamplingParams(temperature=0.0, logprobs=60), Choosing(logprobs=60)),
    "bare_logprob": (SamplingParams(temperature=0.0, logprobs=0), Choosing(logprobs=0)),
}
GREEDY = SamplingParams(temperature=0.0)

Counted = dict[str, tuple[Counter[str], Counter[str]]]
"""(calls, wire bytes) of each axis on which a rank has company."""


def counted(model: TinyModel, layout: Layout, plans: list[StepPlan]) -> list[Counted]:
    """What every rank counts while it runs `plans`, from when it stands until it ends."""
    watched: dict[int, tuple[Mapping[str, Group], Counted]] = {}
    runners: list[Runner] = []

    def watch(parts: Parts) -> Parts:
        runners.append(parts.runner)
        watched[parts.config.world_rank] = parts.groups, snapshot(parts.groups)
        return parts

    ranks = ThreadRanks(rank_config(model, layout, block_size=4), num_blocks=32, attach=watch)
    try:
        for plan in plans:
            ranks.send(plan)
        for _ in plans:
            ranks.receive(timeout_s=30.0)
        for runner in runners:
            runner.catch_up()
    finally:
        ranks.close()
    return [difference(*watched[rank]) for rank in range(layout.world)]


def snapshot(groups: Mapping[str, Group]) -> Counted:
    return {axis: (Counter(group.calls), Counter(group.sent_bytes)) for axis, group in groups.items() if group.size > 1}


def difference(groups: Mapping[str, Group], before: Counted) -> Counted:
    return {axis: (calls - before[axis][0], sent - before[axis][1]) for axis, (calls, sent) in snapshot(groups).items()}


def expected(model: TinyModel, layout: Layout, steps: list[StepShape]) -> list[Counted]:
    axes = [axis for axis in talking_axes(model.spec, layout) if len(groups(layout, axis)[0]) > 1]
    entries = [
        [entry for step in steps for entry in rank_traffic(model.spec, layout, rank, step)] for rank in range(layout.world)
    ]
    return [{axis: counters(rank, axis) for axis in axes} for rank in entries]


def start(index: int, length: int, sampling: SamplingParams = GREEDY) -> SequenceStart:
    return SequenceStart(
        sequence_id=index, tokens=[(7 * index + at) % 101 for at in range(length)], prompt_length=length, sampling=sampling
    )


def blocks_of(index: int) -> list[int]:
    return list(range(6 * index, 6 * index + 6))


@pytest.mark.parametrize("family", ["llama2", "deepseek_v3", *long("deepseek_v2", "mimo_v2")])
def test_the_counters_are_the_traffic(family: str, layout_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged prompts, one of them in three chunks, whose cached keys are exchanged in the second and stay in the third (cp)."""
    monkeypatch.setattr(sequence_parallel, "TOKENS_PER_RANK", 6)
    model, layout = tiny(family), Layout.parse(layout_text)
    if illegal := [violation.message for violation in check(layout, model.spec)]:
        pytest.skip("; ".join(illegal))
    plans = [
        StepPlan(
            step=0,
            started=[start(0, 9), start(1, 24), start(2, 2)],
            rows=[
                Row(sequence_id=0, start=0, count=9, new_blocks=blocks_of(0), sample=True),
                Row(sequence_id=1, start=0, count=11, new_blocks=blocks_of(1)),
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
                Row(sequence_id=1, start=17, count=7, sample=True),
            ],
        ),
        StepPlan(step=3, started=[start(3, 3)], rows=[Row(sequence_id=3, start=0, count=2, new_blocks=blocks_of(3))]),
    ]
    steps = [
        StepShape((RowShape(9), RowShape(11, choosing=None)), "float32", block_size=4),
        StepShape((RowShape(1, 9), RowShape(6, 11, choosing=None), RowShape(2)), "float32", block_size=4),
        StepShape((RowShape(1, 10), RowShape(7, 17)), "float32", block_size=4),
        StepShape.of(1, 2, dtype="float32", num_sampled=0),
    ]
    plans = [in_dp_ranks(plan, layout.attn_dp) for plan in plans]
    steps = [with_dp_ranks(step, plan) for step, plan in zip(steps, plans, strict=True)]
    assert counted(model, layout, plans) == expected(model, layout, steps)


def in_dp_ranks(plan: StepPlan, dp_size: int) -> StepPlan:
    """The plan with its sequences split over the DP ranks."""
    parts = {
        name: [part.model_copy(update={"dp_rank": part.sequence_id % dp_size}) for part in getattr(plan, name)]
        for name in ("started", "rows")
    }
    return plan.model_copy(update=parts)


def with_dp_ranks(step: StepShape, plan: StepPlan) -> StepShape:
    rows = zip(step.rows, plan.rows, strict=True)
    return replace(step, rows=tuple(replace(shape, dp_rank=row.dp_rank) for shape, row in rows))


@pytest.mark.parametrize("layout_text", ["cp=2", "cp=2,cp_style=allgather", "cp=2,tp=3,dcp=3", "tp=5,dcp=5"], indirect=True)
def test_latents_are_what_is_sent(layout_text: str) -> None:
    """Latents weigh so little that queries go to them only behind a long context: 4 new tokens behind 56."""
    model, layout, blocks = tiny("deepseek_v3"), Layout.parse(layout_text), list(range(30))
    plans = [
        StepPlan(step=0, started=[start(0, 60)], rows=[Row(sequence_id=0, start=0, count=56, new_blocks=blocks)]),
        StepPlan(step=1, rows=[Row(sequence_id=0, start=56, count=4, sample=True)]),
    ]
    steps = [StepShape((row,), "float32", block_size=4) for row in (RowShape(56, choosing=None), RowShape(4, 56))]
    assert counted(model, layout, plans) == expected(model, layout, steps)
    passed = [entry for entry in rank_traffic(model.spec, layout, 0, steps[1]) if entry.where == "attention: passed queries"]
    # Of two tokens all six heads, of 20 values of four bytes each.
    assert [entry.payload_bytes for entry in passed] == ([2 * 6 * 20 * 4] if layout.cp > 1 else [])


@pytest.mark.parametrize("family", ["olmo2", "qwen2_moe"])
@pytest.mark.parametrize("layout_text", ["tp=2", "tp=3", "tp=2,pp=2", "cp=2,tp=2"], indirect=True)
def test_norms_over_all_heads_cross_the_group_and_experts_say_no_more_than_an_mlp(family: str, layout_text: str) -> None:
    model, layout = tiny(family), Layout.parse(layout_text)
    plans = [
        StepPlan(
            step=0, started=[start(0, 9)], rows=[Row(sequence_id=0, start=0, count=9, new_blocks=blocks_of(0), sample=True)]
        )
    ]
    assert counted(model, layout, plans) == expected(model, layout, [StepShape((RowShape(9),), "float32", block_size=4)])


@pytest.fixture(params=LAYOUTS)
def layout_text(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    "layout_text", ["tp=2", "tp=3", "tp=5", "tp=3,pp=2", "tp=3,tp_shares=1/9/1", "attn_dp=2,tp=2,lm_head=stage"], indirect=True
)
def test_every_way_of_choosing_is_counted_alone_and_together(layout_text: str) -> None:
    model, layout = tiny("llama2"), Layout.parse(layout_text)
    names = list(KINDS)
    sets = [[name] * 2 for name in names] + [[*names[:4], *names]]
    plans, steps = [], []
    for step, kinds in enumerate(sets):
        ids = [100 * step + at for at in range(len(kinds))]
        rows = [Row(sequence_id=id_, start=0, count=2, new_blocks=[at], sample=True) for at, id_ in enumerate(ids)]
        started = [start(id_, 2, KINDS[name][0]) for id_, name in zip(ids, kinds, strict=True)]
        plans.append(StepPlan(step=step, started=started, rows=rows))
        steps.append(StepShape(tuple(RowShape(2, choosing=KINDS[name][1]) for name in kinds), "float32", block_size=4))
    assert counted(model, layout, plans) == expected(model, layout, steps)


def test_making_a_sampler_is_one_gather_of_sixteen_bytes() -> None:
    def rank(group: Group) -> tuple[int, int]:
        Sampler(group, range(group.rank * 8, group.rank * 8 + 8), 24)
        return group.calls["all_gather"], group.sent_bytes["all_gather"]

    assert run_ranks(thread_groups(3, "tp"), rank) == [(1, 32)] * 3
