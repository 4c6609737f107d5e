"""Rank algebra: coordinates and groups (invariants of a rank grid, pure integers)."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.layout import Layout
from placement.mesh import AXES, Coords, coords, group_of, groups, leader, world_rank

layouts = st.builds(Layout, pp=st.integers(1, 4), attn_dp=st.integers(1, 3), cp=st.integers(1, 3), tp=st.integers(1, 5))

quick = settings(deadline=None, max_examples=50)


@quick
@given(layouts)
def test_rank_to_coordinates_and_back(layout: Layout) -> None:
    seen = [coords(layout, rank) for rank in range(layout.world)]
    assert [world_rank(layout, at) for at in seen] == list(range(layout.world))
    assert len(set(seen)) == layout.world == layout.pp * layout.stage_ranks


@quick
@given(layouts, st.sampled_from(AXES))
def test_the_groups_of_an_axis_partition_the_world(layout: Layout, axis: str) -> None:
    found = groups(layout, axis)
    assert sorted(rank for group in found for rank in group) == list(range(layout.world))
    assert all(len(group) == getattr(layout, axis) for group in found)
    for rank in range(layout.world):
        mine = group_of(layout, axis, rank)
        assert mine[getattr(coords(layout, rank), axis)] == rank


@quick
@given(layouts)
def test_groups_of_two_axes_share_at_most_one_rank(layout: Layout) -> None:
    for one, other in combinations(AXES, 2):
        shared = [set(row) & set(column) for row in groups(layout, one) for column in groups(layout, other)]
        assert all(len(ranks) <= 1 for ranks in shared)
        assert sorted(rank for ranks in shared for rank in ranks) == list(range(layout.world))


def test_a_grid_by_hand() -> None:
    layout = Layout(pp=2, tp=3)
    assert groups(layout, "tp") == [[0, 1, 2], [3, 4, 5]]
    assert groups(layout, "pp") == [[0, 3], [1, 4], [2, 5]]
    assert coords(layout, 4) == Coords(pp=1, attn_dp=0, cp=0, tp=1)


@quick
@given(layouts)
def test_tp_groups_are_contiguous(layout: Layout) -> None:
    assert groups(layout, "tp") == [list(range(first, first + layout.tp)) for first in range(0, layout.world, layout.tp)]


def test_ranks_and_axes_that_do_not_exist_are_refused() -> None:
    with pytest.raises(IndexError, match=r"world rank 6 is outside 0\.\.5"):
        coords(Layout(pp=2, tp=3), 6)
    with pytest.raises(KeyError, match="no axis 'pt'"):
        groups(Layout(), "pt")


@pytest.mark.parametrize(("text", "rank"), [("", 0), ("tp=3", 0), ("pp=2,tp=3", 3), ("cp=2,tp=2", 0), ("cp=2,tp=2,pp=3", 8)])
def test_the_leader_is_the_first_rank_of_the_last_stage(text: str, rank: int) -> None:
    assert leader(Layout.parse(text)) == rank


def test_dcp_groups_are_consecutive_ranks_of_a_tp_group() -> None:
    layout = Layout(cp=2, tp=4, dcp=2)
    assert groups(layout, "dcp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert group_of(layout, "dcp", 6) == [6, 7]
    assert groups(Layout(tp=2), "dcp") == [[0], [1]]
