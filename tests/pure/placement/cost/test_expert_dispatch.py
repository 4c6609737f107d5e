"""Expected rows on the wire, against the published numbers and a router that draws."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cost.expert_dispatch import (
    chances_with_copies,
    destination_chances,
    distinct_ranks,
    rows_dispatched,
    rows_received,
)
from placement.experts.expert_map import ExpertMap, initial, place

quick = settings(deadline=None, max_examples=50)


@pytest.mark.parametrize(("experts", "top_k", "ranks", "expected"), [(256, 8, 8, 5.29), (256, 8, 32, 7.27), (64, 6, 8, 4.54)])
def test_published_numbers_of_destination_ranks(experts: int, top_k: int, ranks: int, expected: float) -> None:
    assert distinct_ranks(experts, top_k, ranks) == pytest.approx(expected, abs=0.006)


@quick
@given(st.integers(1, 9), st.integers(1, 4), st.data())
def test_destination_ranks_by_counting_all_draws(experts: int, ranks: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    ranks = min(ranks, experts)
    placed = initial(1, experts, ranks)
    draws = [{placed.rank_of(expert) for expert in draw} for draw in combinations(range(experts), top_k)]
    mean = sum(map(len, draws)) / len(draws)
    assert distinct_ranks(experts, top_k, ranks) == pytest.approx(mean)
    assert chances_with_copies(placed, 0, top_k) == pytest.approx(destination_chances(experts, top_k, placed.slots))


def test_a_router_that_draws_reaches_as_many_ranks_as_expected() -> None:
    source = np.random.default_rng(3)
    load = [source.lognormal(0, 1, 64).tolist()]
    for placed in (initial(1, 64, 8), place(load, 8, 16)):
        reached = []
        for _ in range(4000):
            position = int(source.integers(0, 4096))
            experts = source.choice(64, 6, replace=False)
            reached.append(len({placed.rank_of(placed.slot_of(0, int(expert), position)) for expert in experts}))
        assert sum(chances_with_copies(placed, 0, 6)) == pytest.approx(np.mean(reached), rel=0.02)


def test_rows_leave_for_other_ranks_and_arrive_from_all() -> None:
    """Two ranks, one expert each, one a token: half of a rank's rows are its own."""
    chances = destination_chances(2, 1, [1, 1])
    assert rows_dispatched([6, 0], chances) == [3, 0]
    assert rows_received([6, 0], chances) == [3, 3]


def test_splitting_tokens_over_tp_cuts_the_rows_by_tp() -> None:
    """Before the split each of four tp ranks holds all 64 tokens of a DP rank; after, 16."""
    chances = destination_chances(256, 8, [16] * 16)
    assert sum(rows_dispatched([64] * 16, chances)) == pytest.approx(4 * sum(rows_dispatched([16] * 16, chances)))


def test_an_expert_on_every_rank_is_reached_on_one() -> None:
    everywhere = ExpertMap(1, (1, 1, 1), ((0, 0, 0),))
    assert chances_with_copies(everywhere, 0, 1) == pytest.approx([1 / 3] * 3)
