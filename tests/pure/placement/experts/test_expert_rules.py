"""The rules of DP ranks and expert axes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from placement.cost.step_shape import StepShape
from placement.experts.expert_map import map_of
from placement.explain.explain_text import as_text
from placement.explain.explanation import explain
from placement.layout.layout import Layout, LayoutError
from placement.layout.mesh import coords_of
from placement.legality import rules
from placement.legality.check import check, require
from placement.legality.suggestions import devices_of
from placement.model.moe_spec import MoESpec
from placement.model.spec import ModelSpec
from placement.nodes.hardware import ClusterSpec, NodeSpec
from placement.ownership.shards import shard
from tests.support.models.specs import DENSE

EXPERTS = MoESpec(num_experts=10, top_k=2, expert_size=12, layers=(1, 2, 3))
SPARSE = DENSE.model_copy(update={"moe": EXPERTS})


def nodes(*slots: int) -> ClusterSpec:
    return ClusterSpec(nodes=tuple(NodeSpec(name=f"node{at}", slots=count) for at, count in enumerate(slots)))


@pytest.mark.parametrize(
    "text",
    [
        "tp=2",
        "tp=4,ep=2",
        "tp=4,ep=4,redundant_experts=3",
        "attn_dp=3,ep=3",
        "attn_dp=2,cp=2,tp=3,pp=2,ep=6,moe_dp=2",
        "attn_dp=2,cp=2,tp=2,pp=2,moe_dp=2,ep=2,moe_tp=2",
        "attn_dp=2,tp=2,tp_shares=2/1,sp=true,ep=4",
        "attn_dp=11,redundant_experts=1,ep=11",
        "attn_dp=2,redundant_experts=10,ep=2",
    ],
)
def test_what_fills_the_stage_is_legal(text: str) -> None:
    assert check(Layout.parse(text), SPARSE) == []


def test_a_dense_model_runs_in_dp_ranks() -> None:
    assert check(Layout.parse("attn_dp=3,cp=2,tp=2,pp=2"), DENSE) == []


@pytest.mark.parametrize(
    ("text", "field", "parts", "nearest"),
    [
        ("tp=4,ep=3", "ep", ["moe_dp=1 x ep=3", "the 4 ranks of a stage (attn_dp=1 x cp=1 x tp=4)"], "tp=4,ep=2"),
        ("tp=6,moe_dp=4", "moe_dp", ["moe_dp=4 x ep=1 does not divide the 6 ranks"], "tp=6,moe_dp=3"),
        ("tp=4,moe_tp=2", "moe_tp", ["moe_dp=1 x ep=1 x moe_tp=2 is 2 ranks", "the 4 ranks"], "tp=4,ep=2"),
        ("tp=4,ep=4,moe_tp=2", "moe_tp", ["ep=4 x moe_tp=2 is 8 ranks"], "tp=4,ep=2"),
        ("attn_dp=16,tp=1", "ep", ["moe_tp=16 is more than the 12 columns"], "attn_dp=16,ep=2"),
        ("attn_dp=12,ep=12", "ep", ["ep=12 is more than the 10 experts"], "attn_dp=12,ep=6"),
        (
            "attn_dp=12,ep=12,redundant_experts=1",
            "ep",
            ["10 experts and 1 redundant ones"],
            "attn_dp=12,ep=6,redundant_experts=1",
        ),
        ("tp=2,redundant_experts=3", "redundant_experts", ["redundant_experts=3", "ep=1"], "tp=2,ep=2,redundant_experts=3"),
        (
            "tp=2,ep=2,redundant_experts=11",
            "redundant_experts",
            ["11 is more than 10", "the 10 experts"],
            "tp=2,ep=2,redundant_experts=10",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers_and_what_would(
    text: str, field: str, parts: list[str], nearest: str
) -> None:
    [violation] = check(Layout.parse(text), SPARSE)
    assert violation.field == field
    assert all(part in violation.message for part in parts)
    assert nearest in map(str, map(Layout.parse, violation.suggestions)), violation.suggestions


@pytest.mark.parametrize("text", ["tp=2,ep=2", "tp=2,moe_dp=2", "tp=2,redundant_experts=1"])
def test_a_dense_model_has_no_experts_to_place(text: str) -> None:
    [violation] = check(Layout.parse(text), DENSE)
    assert violation.field in text
    assert "the model has none" in violation.message
    assert violation.suggestions[0] == "tp=2"


def test_dp_ranks_that_do_not_fit_the_cluster_become_fewer() -> None:
    [violation] = check(Layout.parse("attn_dp=8,ep=8"), SPARSE, nodes(3, 2))
    assert violation.field == "attn_dp"
    assert "attn_dp=4,ep=4" in violation.suggestions


@pytest.mark.parametrize(
    ("experts", "text", "spread"),
    [
        (256, "tp=3,ep=3", "256 experts over 3 ep ranks: 86 on 1 rank, 85 on 2 ranks"),
        (128, "attn_dp=6,ep=6", "128 experts over 6 ep ranks: 22 on 2 ranks, 21 on 4 ranks"),
        (60, "tp=8,ep=8", "60 experts over 8 ep ranks: 8 on 4 ranks, 7 on 4 ranks"),
        (64, "attn_dp=48,ep=48", "64 experts over 48 ep ranks: 2 on 16 ranks, 1 on 32 ranks"),
        (64, "attn_dp=48,ep=48,redundant_experts=32", "64 experts and 32 redundant ones over 48 ep ranks: 2 on each"),
    ],
)
def test_experts_need_not_divide_and_explain_says_how_they_are_spread(experts: int, text: str, spread: str) -> None:
    model = SPARSE.model_copy(update={"moe": EXPERTS.model_copy(update={"num_experts": experts})})
    layout = Layout.parse(text)
    assert check(layout, model) == []
    assert spread in as_text(explain(model, layout, StepShape.of(1, 1)), "m").splitlines()
    assert [len(shard(model, layout, coords_of(layout, rank)).experts) for rank in range(layout.world)] == list(
        map_of(model.moe, layout).slots
    )


def test_fewer_than_no_redundant_experts_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"redundant_experts is '-1', but must be a whole number from 0"):
        Layout.parse("tp=2,ep=2,redundant_experts=-1")
    with pytest.raises(ValidationError, match="redundant_experts"):
        Layout(tp=2, ep=2, redundant_experts=-1)


def test_a_layout_that_breaks_two_rules_is_told_both() -> None:
    broken = check(Layout.parse("tp=9,redundant_experts=2"), SPARSE)
    assert [violation.field for violation in broken] == ["tp", "redundant_experts"]
    assert "tp=9 is more than the 8 query heads" in broken[0].message
    assert "redundant_experts=2 are copies on other ep ranks, but ep=1" in broken[1].message
    with pytest.raises(LayoutError, match=r"query heads(.|\n)*\n- redundant_experts=2"):
        require(Layout.parse("tp=9,redundant_experts=2"), SPARSE)


layouts = st.builds(
    Layout,
    replicas=st.integers(1, 3),
    pp=st.integers(1, 5),
    attn_dp=st.integers(1, 6),
    cp=st.integers(1, 3),
    tp=st.integers(1, 9),
    ep=st.integers(1, 12),
    moe_dp=st.integers(1, 4),
    redundant_experts=st.sampled_from([0, 0, 1, 5, 40]),
)


@settings(deadline=None, max_examples=60)
@given(layouts, st.sampled_from([DENSE, SPARSE]), st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_every_suggestion_passes(layout: Layout, model: ModelSpec, slots: list[int] | None) -> None:
    cluster = nodes(*slots) if slots else None
    for violation in check(layout, model, cluster):
        assert violation.suggestions
        assert all(check(Layout.parse(text), model, cluster) == [] for text in violation.suggestions)


@settings(deadline=None, max_examples=100)
@given(layouts)
def test_legal_means_the_grids_agree_and_nobody_is_without_an_expert(layout: Layout) -> None:
    broken = {field for field, _ in rules.broken(layout, SPARSE, None)}
    fills = layout.moe_dp * layout.ep * layout.moe_tp == layout.stage_ranks
    most = EXPERTS.num_experts * (layout.ep - 1)
    served = layout.ep <= EXPERTS.num_experts + layout.redundant_experts and layout.redundant_experts <= most
    fits = layout.tp <= 8 and layout.pp <= 4
    assert (not broken) == (fills and served and fits and layout.moe_tp <= EXPERTS.expert_size)


_SIZES = (1, 2, 3)
_KEPT = ("pp", "attn_dp", "cp", "tp", "ep", "moe_dp")


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({}, optional={axis: st.sampled_from(_SIZES) for axis in _KEPT}))
def test_a_suggestion_keeps_every_axis_that_was_asked_for_if_some_layout_can(asked: dict[str, int]) -> None:
    layout = Layout(**asked)
    violations = check(layout, SPARSE)
    wanted = [axis for axis, size in asked.items() if size > 1]
    most = devices_of(layout)

    def keeps(other: Layout) -> bool:
        return all(getattr(other, axis) > 1 for axis in wanted)

    others = (dict(zip(_KEPT, sizes, strict=True)) for sizes in product(_SIZES, repeat=len(_KEPT)))
    tried = (Layout(**other) for other in others if other["ep"] * other["moe_dp"] <= 12)
    can = any(keeps(other) and other.devices <= most and not rules.broken(other, SPARSE, None) for other in tried)
    for violation in violations if can else []:
        found = [Layout.parse(text) for text in violation.suggestions]
        assert any(map(keeps, found)), violation
