"""Whose tokens are whose on the way to the experts, and in which mode they are dispatched."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cost import expert_modes
from placement.cost.expert_dispatch import distinct_ranks
from placement.cost.expert_traffic import Routed
from placement.cost.step_shape import StepShape
from placement.cost.traffic import rank_traffic
from placement.layout.layout import Layout
from placement.layout.mesh import GROUP_AXES, coords_of, groups, talking_axes
from placement.layout.partition import partition
from placement.legality.check import check
from placement.model.moe_spec import MoESpec
from placement.model.spec import ModelSpec
from placement.ownership import expert_tokens
from placement.ownership.context import is_split, spans
from placement.ownership.shards import parameters, shard


def model(num_experts: int, top_k: int = 2, expert_size: int = 64, **fields: int) -> ModelSpec:
    """One layer, of experts only."""
    moe = MoESpec(num_experts=num_experts, top_k=top_k, expert_size=expert_size, layers=(0,), **fields)
    sizes = {"hidden_size": 64, "num_heads": 16, "num_kv_heads": 16, "head_dim": 4, "intermediate_size": 64, "vocab_size": 128}
    return ModelSpec(family="mixtral", num_layers=1, max_position=64, norm_eps=1e-5, windows=(None,), moe=moe, **sizes)


lens = st.lists(st.integers(1, 20), min_size=1, max_size=5)


@settings(deadline=None, max_examples=200)
@given(lens, st.integers(1, 4), st.integers(1, 5))
def test_every_token_is_owned_by_exactly_one_rank(new_lens: list[int], cp: int, tp: int) -> None:
    own_tokens: list[tuple[int, int]] = []
    counts: list[int] = []
    for cp_rank in range(cp):
        runs = [(row, at) for row, count in enumerate(new_lens) for span in spans(0, count, cp, cp_rank) for at in span]
        single, common = expert_tokens.places(new_lens, cp, cp_rank)
        assert sorted(single + common) == list(range(len(runs)))
        assert len(common) == expert_tokens.num_common(new_lens, cp)
        mine = partition(len(common), cp)[cp_rank]
        of_group = [runs[place] for place in [*single, *common[mine.start : mine.stop]]]
        own_tokens += of_group
        counts += [len(part) for part in partition(len(of_group), tp)]
    assert sorted(own_tokens) == [(row, at) for row, count in enumerate(new_lens) for at in range(count)]
    assert counts == expert_tokens.own_tokens([new_lens], Layout(cp=cp, tp=tp))


@settings(deadline=None, max_examples=100)
@given(lens, st.integers(1, 4), st.integers(1, 4))
def test_without_common_rows_own_tokens_are_those_of_the_region(new_lens: list[int], cp: int, tp: int) -> None:
    split = [count for count in new_lens if cp == 1 or is_split(count, cp)]
    runs = [sum(len(span) for count in split for span in spans(0, count, cp, rank)) for rank in range(cp)]
    assert expert_tokens.of_tp_groups(split, cp) == runs
    assert sum(runs) == sum(split)
    assert expert_tokens.own_tokens([split], Layout(cp=cp, tp=tp)) == [len(part) for run in runs for part in partition(run, tp)]


@pytest.mark.parametrize(
    ("text", "tokens", "mode"),
    [
        ("tp=8,ep=8", 1, "sum"),
        ("tp=8,ep=8", 100_000, "a2a"),
        ("tp=8", 100_000, "sum"),
        ("cp=8,ep=8", 1, "gather"),
        ("cp=8,ep=8", 100_000, "a2a"),
        ("cp=8,ep=8,dispatch=gather", 100_000, "gather"),
        ("tp=8,ep=8,dispatch=gather", 100_000, "sum"),
        ("tp=8,ep=8,dispatch=a2a", 1, "a2a"),
        ("tp=8,moe_dp=2,ep=4", 1, "gather"),
        ("cp=2,tp=4,moe_dp=2,ep=4", 1, "gather"),
        ("cp=2,tp=4,moe_dp=2,ep=4", 100, "sum"),
        ("cp=2,tp=4", 100_000, "gather"),
    ],
)
def test_the_mode_follows_from_the_tokens(text: str, tokens: int, mode: str) -> None:
    assert expert_modes.mode(model(16), Layout.parse(text), [[tokens]], 2) == mode


def test_the_mode_changes_once_as_tokens_grow() -> None:
    layout, spec = Layout(cp=4, tp=2, ep=8), model(64, top_k=4)
    modes = [expert_modes.mode(spec, layout, [[2**power]], 2) for power in range(20)]
    assert modes == sorted(modes, reverse=True)
    assert set(modes) == {"gather", "a2a"}


def shapes(spec: ModelSpec, layout: Layout, rank: int) -> dict[str, tuple[int, ...]]:
    rows = parameters(spec, shard(spec, layout, coords_of(layout, rank)))
    return {row.name.split("experts.")[1]: row.shape for row in rows if ".experts." in row.name}


def test_sixteen_whole_experts_of_256_on_each_of_16_ranks() -> None:
    layout, spec = Layout.parse("tp=16,ep=16"), model(256, top_k=8)
    assert check(layout, spec) == []
    assert layout.moe_tp == 1
    assert [shard(spec, layout, coords_of(layout, rank)).experts for rank in (0, 15)] == [
        tuple(range(16)),
        tuple(range(240, 256)),
    ]
    assert shapes(spec, layout, 5) == {"gate_up": (16, 128, 64), "down": (16, 64, 64)}


def test_half_of_one_mixtral_expert_on_each_of_16_ranks() -> None:
    layout, spec = Layout.parse("tp=16,ep=8"), model(8)
    assert layout.moe_tp == 2
    owns = [shard(spec, layout, coords_of(layout, rank)) for rank in range(16)]
    assert [(own.experts, own.expert_columns) for own in owns[:3]] == [
        ((0,), range(32)),
        ((0,), range(32, 64)),
        ((1,), range(32)),
    ]
    assert shapes(spec, layout, 15) == {"gate_up": (1, 64, 64), "down": (1, 64, 32)}


def test_dp_ranks_hold_what_replicas_would_but_a_quarter_of_the_experts() -> None:
    spec = model(256, top_k=8)
    dp_ranks, replicas = Layout.parse("attn_dp=4,tp=4,ep=16"), Layout.parse("replicas=4,tp=4,ep=4")
    for rank in range(dp_ranks.world):
        one, other = (shard(spec, layout, coords_of(layout, rank % layout.world)) for layout in (dp_ranks, replicas))
        assert (one.q_heads, one.kv_heads, one.vocab) == (other.q_heads, other.kv_heads, other.vocab)
        rows = [[row for row in parameters(spec, own) if ".experts." not in row.name] for own in (one, other)]
        assert rows[0] == rows[1]
        assert (len(one.experts), len(other.experts)) == (16, 64)


@given(st.lists(st.lists(st.integers(1, 20), max_size=4), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 4))
def test_dp_ranks_contribute_their_own_tokens(new_lens_across_dp: list[list[int]], cp: int, tp: int) -> None:
    layout = Layout(attn_dp=len(new_lens_across_dp), cp=cp, tp=tp)
    own_tokens = expert_tokens.own_tokens(new_lens_across_dp, layout)
    size = cp * tp
    assert [sum(own_tokens[dp_rank * size : (dp_rank + 1) * size]) for dp_rank in range(len(new_lens_across_dp))] == list(
        map(sum, new_lens_across_dp)
    )


def test_a_tp_wider_than_an_expert_is_legal_where_experts_are_whole() -> None:
    spec = model(16, expert_size=4)
    assert check(Layout.parse("tp=16,ep=16"), spec) == []
    [violation] = check(Layout.parse("tp=16"), spec)
    assert "moe_tp=16 is more than the 4 columns" in violation.message


def test_only_models_with_experts_have_the_group_of_a_copy() -> None:
    assert talking_axes(model(4)) == (*GROUP_AXES, "moe")
    assert talking_axes(model(4).model_copy(update={"moe": None})) == GROUP_AXES
    assert groups(Layout.parse("cp=2,tp=4,moe_dp=2,pp=2"), "moe") == [list(range(at, at + 4)) for at in (0, 4, 8, 12)]


def test_expected_rows_are_those_of_a_router_that_favours_nobody() -> None:
    """256 experts, 8 a token, on 8 ranks: 5.3 rows a token, of which one in eight stays."""
    spec, layout = model(256, top_k=8), Layout.parse("cp=8,ep=8,dispatch=a2a")
    [sent] = [
        entry for entry in rank_traffic(spec, layout, 0, StepShape.of(1, 8000)) if entry.where == "mlp input: dispatched rows"
    ]
    rows = sent.payload_bytes / (64 * 2 + 8 * 8) / 1000
    assert rows == pytest.approx(distinct_ranks(256, 8, 8), rel=1e-3) == pytest.approx(5.29, rel=1e-3)
    assert sent.wire_bytes_per_rank / sent.payload_bytes == pytest.approx(7 / 8, rel=1e-3)


def test_measured_rows_take_the_place_of_expected_ones() -> None:
    spec, layout = model(8), Layout.parse("cp=2,ep=2,dispatch=a2a")
    entries = rank_traffic(spec, layout, 0, StepShape.of(1, 8), [Routed(sent=6, to_self=4, received=7)])
    row = 64 * 2
    assert [(entry.op, entry.payload_bytes, entry.wire_bytes_per_rank) for entry in entries if entry.axis == "moe"] == [
        ("all_to_all", 16, 8),
        ("all_to_all", 6 * (row + 16), 2 * (row + 16)),
        ("all_to_all", 7 * row, 3 * row),
    ]


def test_rows_sent_do_not_grow_with_tp() -> None:
    """All tp ranks hold the same tokens, but each token is of one of them."""
    spec = model(64, top_k=4)
    rows = {
        tp: sum(
            entry.payload_bytes
            for rank in range(8)
            for entry in rank_traffic(spec, Layout(cp=8 // tp, tp=tp, ep=8, dispatch="a2a"), rank, StepShape.of(1, 8000))
            if entry.where == "mlp input: dispatched rows"
        )
        for tp in (1, 4)
    }
    assert rows[4] == pytest.approx(rows[1], rel=1e-3)


def test_starts_of_own_tokens_are_in_rank_order() -> None:
    own_tokens = expert_tokens.own_tokens([[1, 12]], Layout(cp=2, tp=2))
    assert own_tokens == [4, 3, 3, 3]
    assert list(accumulate(expert_tokens.of_copy(own_tokens, Layout(cp=2, tp=2, moe_dp=2), 1))) == [3, 6]
