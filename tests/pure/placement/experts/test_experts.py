"""Placing experts: the map, how evenly it spreads a load, what moves between two maps, and what a lost rank takes along."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.experts import bound as expert_bound
from placement.experts import packing
from placement.experts.expert_map import (
    ExpertMap,
    balancedness,
    bound,
    initial,
    place,
    rank_loads_of,
    slots_of_ranks,
    stays_on_nodes,
    surviving,
)
from placement.experts.moves import assignment, moves, settled
from tests.support.expert_loads import greedy, public, skewed

quick = settings(deadline=None, max_examples=60)

PUBLISHED = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
"""The example of the README of DeepSeek's EPLB: 12 experts, 16 slots, 4 groups, 2 nodes, 8 ranks."""

PUBLISHED_ANSWER = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[float]], int, int]:
    """(load, ranks, redundant): any numbers that are possible, with ties and zeros in the load."""
    num_experts = draw(st.integers(1, 12))
    ranks = draw(st.integers(1, 6))
    redundant = draw(st.integers(max(0, ranks - num_experts), min(num_experts * (ranks - 1), 8) if ranks > 1 else 0))
    number = st.sampled_from([0.0, 0.0, 1.0, 3.0, 1e6]) | st.floats(0, 100)
    row = st.lists(number, min_size=num_experts, max_size=num_experts)
    return draw(st.lists(row, min_size=1, max_size=2)), ranks, redundant


# The map


@quick
@given(problems())
def test_every_slot_is_filled_and_no_rank_holds_an_expert_twice(problem: tuple[list[list[float]], int, int]) -> None:
    load, ranks, redundant = problem
    for placed in (place(load, ranks, redundant), initial(len(load), len(load[0]), ranks, redundant)):
        assert sum(placed.slots) == len(load[0]) + redundant
        assert max(placed.slots) - min(placed.slots) <= 1
        for layer in range(len(load)):
            assert sum(placed.copies(layer)) == sum(placed.slots)
            assert min(placed.copies(layer)) >= 1
            for expert, slots in enumerate(placed.holders[layer]):
                assert all(placed.experts[layer][slot] == expert for slot in slots)
            for rank in range(ranks):
                held = placed.on_rank(layer, rank)
                assert len(set(held)) == len(held) == placed.slots[rank]
                assert all(placed.rank_of(slot) == rank for slot in placed.ranges[rank])


@quick
@given(problems())
def test_balancedness_is_within_its_bound(problem: tuple[list[list[float]], int, int]) -> None:
    load, ranks, redundant = problem
    placed = place(load, ranks, redundant)
    for even, most in zip(balancedness(placed, load), bound(load, placed.slots), strict=True):
        assert 1 / ranks - 1e-9 <= even <= most * (1 + 1e-9) <= 1 + 1e-8


@quick
@given(problems())
def test_the_same_load_gives_the_same_map(problem: tuple[list[list[float]], int, int]) -> None:
    load, ranks, redundant = problem
    assert place(load, ranks, redundant) == place([list(row) for row in load], ranks, redundant)


def test_the_map_drawn_in_the_docstring() -> None:
    first = initial(1, 10, 4, 2)
    assert first.experts == ((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1),)
    load = [[9.0] + [1.0] * 9]
    by_load = place(load, 4, 2)
    assert by_load.experts == ((0, 4, 7, 0, 5, 8, 0, 6, 9, 1, 2, 3),)
    assert by_load.holders[0][0] == (0, 3, 6)
    assert rank_loads_of(first, 0, load[0]) == [6, 3, 3, 6]
    assert rank_loads_of(by_load, 0, load[0]) == [5, 5, 5, 3]
    assert bound(load, by_load.slots) == [pytest.approx(0.9)]
    assert [by_load.slot_of(0, 0, position) for position in range(4)] == [0, 3, 6, 0]
    assert initial(1, 10, 4).slots == (3, 3, 2, 2)
    assert [initial(1, 10, 4).on_rank(0, rank) for rank in range(4)] == [(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)]


def test_no_load_spreads_copies_and_is_balanced() -> None:
    placed = place([[0.0] * 6], 3, 3)
    assert sorted(placed.copies(0)) == [1, 1, 1, 2, 2, 2]
    assert balancedness(placed, [[0.0] * 6]) == bound([[0.0] * 6], placed.slots) == [1.0]


@pytest.mark.parametrize(("experts", "ranks", "redundant"), [(4, 5, 0), (4, 2, 5)])
def test_impossible_numbers_are_refused(experts: int, ranks: int, redundant: int) -> None:
    with pytest.raises(ValueError, match=f"{experts} experts and {redundant} redundant ones cannot be on {ranks} ranks"):
        place([[1.0] * experts], ranks, redundant)


def test_a_map_that_lost_an_expert_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lacks experts \[2\], and has unknown experts \[7\]"):
        ExpertMap(3, (2, 2), ((0, 1, 7, 1),))
    with pytest.raises(ValueError, match="has 3 slots, but the ranks have 4"):
        ExpertMap(3, (2, 2), ((0, 1, 2),))


# How even


def test_the_reference_is_the_public_algorithm() -> None:
    assert [greedy(row, 16, 4, 2, 8) for row in PUBLISHED] == PUBLISHED_ANSWER


@pytest.mark.parametrize(("groups", "nodes"), [(4, 2), (1, 1), (4, 1), (2, 2)])
def test_the_published_example_is_at_least_as_even(groups: int, nodes: int) -> None:
    load = [[float(number) for number in row] for row in PUBLISHED]
    ours = balancedness(place(load, 8, 4, nodes, groups), load)
    theirs = [balancedness(public(row, 8, 4, groups, nodes), [row])[0] for row in load]
    assert all(mine >= yours - 1e-9 for mine, yours in zip(ours, theirs, strict=True))
    if nodes == 1:
        assert ours == pytest.approx([0.949449, 0.840116], abs=1e-6)
        assert bound(load, (2,) * 8) == pytest.approx([1, 0.875758], abs=1e-6)


def test_random_skews_are_at_least_as_even_as_greedy_and_near_the_bound() -> None:
    """150 here; `benchmarks/experts.py` runs thousands."""
    source = np.random.default_rng(11)
    near = 0
    for _ in range(150):
        load, ranks, redundant = skewed(source)
        placed = place([load], ranks, redundant)
        [even], [most] = balancedness(placed, [load]), bound([load], placed.slots)
        [greedily] = balancedness(public(load, ranks, redundant), [load])
        assert even >= greedily - 1e-9, (len(load), ranks, redundant)
        near += even >= 0.95 * most
    assert near >= 0.95 * 150


def test_one_expert_with_two_fifths_of_the_tokens() -> None:
    load = [[0.4] + [0.6 / 63] * 63]
    before = balancedness(initial(1, 64, 8, 8), load)[0]
    placed = place(load, 8, 8)
    assert before < 0.52
    assert balancedness(placed, load)[0] > 0.99 * bound(load, placed.slots)[0]


@quick
@given(st.lists(st.floats(0, 100).map(lambda tokens: round(tokens, 6)), min_size=2, max_size=5), st.integers(2, 3), st.data())
def test_nothing_is_more_even_than_the_bound(load: list[float], ranks: int, data: st.DataObject) -> None:
    """Against every way to fill the slots without an expert twice on a rank."""
    redundant = data.draw(st.integers(max(0, ranks - len(load)), min(len(load) * (ranks - 1), 2)))
    slots = slots_of_ranks(len(load), ranks, redundant)
    rows = np.array(load)
    least = expert_bound.least_load(rows, slots)
    best = min((packing.rank_loads(rows, holds).max() for holds in _fillings(len(load), slots)), default=float(rows.max()))
    assert least <= best * (1 + 1e-9)
    found = packing.pack(rows, slots)
    assert found.most >= best * (1 - 1e-9)
    assert found.most == pytest.approx(packing.rank_loads(rows, found.holds).max())


def _fillings(num_experts: int, slots: tuple[int, ...]) -> list[np.ndarray]:
    subsets = [np.array([bits >> at & 1 for at in range(num_experts)], dtype=bool) for bits in range(2**num_experts)]
    partial: list[list[np.ndarray]] = [[]]
    for room in slots:
        partial = [[*rows, subset] for rows in partial for subset in subsets if subset.sum() == room]
    return [holds for rows in partial if (holds := np.stack(rows)).any(axis=0).all()]


def test_groups_stay_on_their_node() -> None:
    load = [[float(number) for number in row] for row in PUBLISHED]
    placed = place(load, 8, 4, nodes=2, groups=4)
    assert stays_on_nodes(12, 8, 4, 2, 4)
    for layer in range(2):
        nodes_of_groups: dict[int, set[int]] = {}
        for slot, expert in enumerate(placed.experts[layer]):
            nodes_of_groups.setdefault(expert // 3, set()).add(placed.rank_of(slot) // 4)
        assert sorted(map(len, nodes_of_groups.values())) == [1, 1, 1, 1]


@pytest.mark.parametrize("numbers", [(12, 8, 4, 3, 4), (12, 8, 4, 2, 1), (12, 7, 2, 2, 4), (13, 8, 3, 2, 4), (4, 4, 8, 2, 2)])
def test_what_does_not_divide_over_nodes_is_packed_over_all(numbers: tuple[int, int, int, int, int]) -> None:
    num_experts, ranks, redundant, nodes, groups = numbers
    assert not stays_on_nodes(*numbers)
    load = [[float(1 + at % 5) for at in range(num_experts)]]
    assert place(load, ranks, redundant, nodes, groups) == place(load, ranks, redundant)


# Moves


@quick
@given(problems())
def test_moves_make_the_new_map_of_the_old_one(problem: tuple[list[list[float]], int, int]) -> None:
    load, ranks, redundant = problem
    old = initial(len(load), len(load[0]), ranks, redundant)
    packed = place(load, ranks, redundant)
    new = settled(old, packed)
    assert balancedness(new, load) == pytest.approx(balancedness(packed, load))
    slots = [list(row) for row in old.experts]
    transfers = moves(old, new)
    for transfer in transfers:
        assert old.experts[transfer.layer][transfer.source_slot] == transfer.expert
        assert old.rank_of(transfer.source_slot) == transfer.source_rank
        assert new.rank_of(transfer.target_slot) == transfer.target_rank
        assert not transfer.is_local
        slots[transfer.layer][transfer.target_slot] = transfer.expert
    assert tuple(map(tuple, slots)) == new.experts
    assert len(transfers) <= len(moves(old, packed))
    assert moves(new, new) == []


@quick
@given(problems())
def test_no_order_of_ranks_needs_fewer_transfers(problem: tuple[list[list[float]], int, int]) -> None:
    load, ranks, redundant = problem
    old, packed = initial(1, len(load[0]), ranks, redundant), place(load[:1], ranks, redundant)
    orders = (
        order
        for order in permutations(range(ranks))
        if all(packed.slots[rank] == packed.slots[at] for at, rank in enumerate(order))
    )

    def needed(order: tuple[int, ...]) -> int:
        return sum(len(set(packed.on_rank(0, rank)) - set(old.on_rank(0, at))) for at, rank in enumerate(order))

    assert len(moves(old, settled(old, packed))) == min(map(needed, orders))


def test_the_transfer_drawn_in_the_docstring() -> None:
    old = ExpertMap(5, (3, 3), ((0, 1, 2, 3, 4, 0),))
    new = ExpertMap(5, (3, 3), ((3, 4, 1, 0, 2, 1),))
    assert settled(old, new).experts == ((0, 1, 2, 3, 4, 1),)
    assert sum(not transfer.is_local for transfer in moves(old, new)) == 4
    [transfer] = moves(old, settled(old, new))
    assert (transfer.expert, transfer.source_rank, transfer.target_rank, transfer.target_slot) == (1, 0, 1, 5)


def test_holders_take_turns_to_send() -> None:
    old = ExpertMap(2, (1, 1, 1, 1), ((0, 0, 1, 1),) * 4)
    new = ExpertMap(2, (1, 1, 1, 1), ((0, 0, 0, 1),) * 4)
    assert [transfer.source_rank for transfer in moves(old, new)] == [0, 1, 0, 1]


def test_ranks_change_places_only_on_their_node() -> None:
    old = ExpertMap(4, (1, 1, 1, 1), ((0, 1, 2, 3),))
    new = ExpertMap(4, (1, 1, 1, 1), ((3, 2, 1, 0),))
    assert settled(old, new).experts == ((0, 1, 2, 3),)
    assert settled(old, new, nodes=2).experts == ((3, 2, 1, 0),)


def test_maps_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="maps of other shapes"):
        moves(initial(1, 4, 2), initial(1, 4, 4))


@quick
@given(st.integers(1, 5), st.data())
def test_the_assignment_is_the_cheapest(size: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(-9, 9), min_size=size, max_size=size)
    cost = np.array(data.draw(st.lists(row, min_size=size, max_size=size)), dtype=np.float64)
    found = assignment(cost)
    assert sorted(found) == list(range(size))
    assert cost[range(size), found].sum() == min(cost[range(size), order].sum() for order in permutations(range(size)))


# Loss


@quick
@given(problems(), st.sets(st.integers(0, 5)))
def test_an_expert_survives_where_a_rank_that_is_left_holds_it(
    problem: tuple[list[list[float]], int, int], lost: set[int]
) -> None:
    load, ranks, redundant = problem
    placed = place(load, ranks, redundant)
    for layer, alive in enumerate(surviving(placed, lost)):
        for expert, slots in enumerate(placed.holders[layer]):
            assert (expert in alive) == any(placed.rank_of(slot) not in lost for slot in slots)


def test_rank_loads_of_a_map_by_hand() -> None:
    placed = ExpertMap(3, (2, 2), ((0, 1, 0, 2),))
    assert rank_loads_of(placed, 0, [6, 1, 3]) == [4, 6]
    assert balancedness(placed, [[6, 1, 3]]) == [5 / 6]
