"""Rank algebra: coordinates and groups (invariants of a rank grid, pure integers)."""

from __future__ import annotations

from itertools import combinations
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.layout.layout import Layout
from placement.layout.mesh import (
    AXES,
    MOE_AXES,
    Coords,
    MoECoords,
    coords_of,
    group_of,
    groups,
    moe_coords_of,
    moe_world_rank,
    output_ranks,
    world_rank,
)

grids = st.sampled_from([AXES, MOE_AXES])


@st.composite
def both_factorings(draw: st.DrawFn) -> Layout:
    """A layout whose MoE axes are a factoring of their own of the same ranks."""
    fields = {axis: draw(st.integers(1, 3)) for axis in ("pp", "attn_dp", "cp")} | {"tp": draw(st.integers(1, 5))}
    ranks = fields["attn_dp"] * fields["cp"] * fields["tp"]
    moe_dp = draw(st.sampled_from([size for size in range(1, ranks + 1) if ranks % size == 0]))
    ep = draw(st.sampled_from([size for size in range(1, ranks + 1) if ranks % (moe_dp * size) == 0]))
    return Layout(**fields, moe_dp=moe_dp, ep=ep)


layouts = st.builds(Layout, pp=st.integers(1, 4), attn_dp=st.integers(1, 3), cp=st.integers(1, 3), tp=st.integers(1, 5))

quick = settings(deadline=None, max_examples=50)


@quick
@given(both_factorings())
def test_rank_to_coordinates_and_back(layout: Layout) -> None:
    seen = [coords_of(layout, rank) for rank in range(layout.world)]
    assert [world_rank(layout, coords) for coords in seen] == list(range(layout.world))
    assert len(set(seen)) == layout.world == layout.pp * layout.stage_ranks
    in_moe = [moe_coords_of(layout, rank) for rank in range(layout.world)]
    assert [moe_world_rank(layout, coords) for coords in in_moe] == list(range(layout.world))
    assert len(set(in_moe)) == layout.world == layout.pp * layout.moe_dp * layout.ep * layout.moe_tp
    assert [coords.pp for coords in in_moe] == [coords.pp for coords in seen]


@quick
@given(both_factorings(), grids)
def test_the_groups_of_an_axis_partition_the_world(layout: Layout, axes: tuple[str, ...]) -> None:
    place = coords_of if axes == AXES else moe_coords_of
    for axis in axes:
        found = groups(layout, axis)
        assert sorted(rank for group in found for rank in group) == list(range(layout.world))
        assert all(len(group) == getattr(layout, axis) for group in found)
        for group in found:
            assert [getattr(place(layout, rank), axis) for rank in group] == list(range(len(group)))
        assert group_of(layout, axis, found[-1][-1]) == found[-1]


@quick
@given(both_factorings(), grids)
def test_groups_of_two_axes_meet_in_exactly_one_rank(layout: Layout, axes: tuple[str, ...]) -> None:
    members = {axis: {rank: set(group) for group in groups(layout, axis) for rank in group} for axis in axes}
    for one, other in combinations(axes, 2):
        assert all(members[one][rank] & members[other][rank] == {rank} for rank in range(layout.world))


@quick
@given(both_factorings())
def test_the_moe_grid_is_the_stage_again(layout: Layout) -> None:
    """No MoE group leaves its stage, and the three axes together reach all of it."""
    size = layout.stage_ranks
    for axis in MOE_AXES[1:]:
        assert all(len({rank // size for rank in group}) == 1 for group in groups(layout, axis))
    assert prod(getattr(layout, axis) for axis in MOE_AXES[1:]) == size


def test_four_dp_ranks_of_four_ranks_share_sixteen_ep_ranks() -> None:
    layout = Layout(attn_dp=4, tp=4, ep=16)
    assert layout.moe_tp == 1
    for dp_rank in range(4):
        for tp_rank in range(4):
            assert coords_of(layout, dp_rank * 4 + tp_rank) == Coords(pp=0, attn_dp=dp_rank, cp=0, tp=tp_rank)
    assert groups(layout, "tp") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups(layout, "ep") == [list(range(16))]


def test_two_moe_copies_of_four_ep_ranks_in_halves() -> None:
    layout = Layout(attn_dp=4, tp=4, moe_dp=2, ep=4)
    assert layout.moe_tp == 2
    assert groups(layout, "moe_tp")[:5] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert groups(layout, "ep") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert groups(layout, "moe_dp") == [[rank, rank + 8] for rank in range(8)]
    assert moe_coords_of(layout, 13) == MoECoords(pp=0, moe_dp=1, ep=2, moe_tp=1)


def test_a_grid_by_hand() -> None:
    layout = Layout(pp=2, tp=3)
    assert groups(layout, "tp") == [[0, 1, 2], [3, 4, 5]]
    assert groups(layout, "pp") == [[0, 3], [1, 4], [2, 5]]
    assert coords_of(layout, 4) == Coords(pp=1, attn_dp=0, cp=0, tp=1)


@quick
@given(layouts)
def test_tp_groups_are_contiguous(layout: Layout) -> None:
    assert groups(layout, "tp") == [list(range(first, first + layout.tp)) for first in range(0, layout.world, layout.tp)]


def test_ranks_and_axes_that_do_not_exist_are_refused() -> None:
    with pytest.raises(IndexError, match=r"world rank 6 is outside 0\.\.5"):
        coords_of(Layout(pp=2, tp=3), 6)
    with pytest.raises(IndexError, match=r"world rank 6 is outside 0\.\.5"):
        moe_coords_of(Layout(pp=2, tp=3), 6)
    with pytest.raises(KeyError, match="no axis 'pt'"):
        groups(Layout(), "pt")


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        *(("", [0]), ("tp=3", [0]), ("pp=2,tp=3", [3]), ("cp=2,tp=2", [0]), ("cp=2,tp=2,pp=3", [8])),
        *(("attn_dp=4,tp=4", [0, 4, 8, 12]), ("attn_dp=2,cp=2,tp=2,pp=2", [8, 12])),
    ],
)
def test_the_output_rank_of_a_dp_rank_is_its_first_rank_of_the_last_stage(text: str, ranks: list[int]) -> None:
    assert output_ranks(Layout.parse(text)) == ranks


def test_dcp_groups_are_consecutive_ranks_of_a_tp_group() -> None:
    layout = Layout(cp=2, tp=4, dcp=2)
    assert groups(layout, "dcp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert group_of(layout, "dcp", 6) == [6, 7]
    assert groups(Layout(tp=2), "dcp") == [[0], [1]]
