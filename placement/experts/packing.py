"""Expert packing (EPLB): replicates and places the experts of one layer so that the load of the most loaded rank is minimal.

Each of the `c` copies of an expert has 1/c of its load (the token's position decides which copy runs it, see
`placement.experts.expert_map`). Every rank has a fixed number of slots, all are filled, and no rank holds an expert twice.

1. Replication: each further copy goes to the expert whose copies are heaviest, which makes the heaviest copy as light as
   possible.
2. Greedy packing: experts in descending order of a copy's load, each on the least loaded ranks with free slots.
3. Local search, as long as the maximum load falls: the most loaded rank swaps a copy with another rank; else it swaps two
   copies with one of the `_LIGHTEST` least loaded ranks; else a slot is given to another expert.
4. Restarts: if the maximum load is more than `_CLOSE_ENOUGH` times the lower bound (`least_load`), or exceeds that of plain
   greedy packing (which may hold an expert twice on a rank), the search restarts from the best packing with a few random
   changes.

Ties are resolved in favour of the lowest index, and the random changes use a fixed seed: equal loads give equal packings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.experts.bound import least_load

Loads = NDArray[np.float64]
SlotCounts = NDArray[np.int64]
Holds = NDArray[np.bool_]
"""Boolean matrix, ``[ranks, experts]``: whether a rank holds an expert."""

_CLOSE_ENOUGH = 1.005
_SHUFFLES, _MOST_SHUFFLES = 40, 400
"""Maximum number of restarts to approach the lower bound, and to match the load of plain greedy packing."""
_CHANGES_A_SHUFFLE = 4
_LIGHTEST = 8
_GAIN = 1e-7
"""Smallest relative gain of a step of the search; anything less is attributed to rounding."""


@dataclass(frozen=True)
class Packing:
    """A packing: which rank holds which experts, and the load of each rank."""

    holds: Holds
    loads: Loads

    @property
    def most(self) -> float:
        """Load of the most loaded rank, in the unit of `loads`."""
        return float(self.loads.max())


def pack(load: Loads, slots: Sequence[int]) -> Packing:
    """Returns a packing of the experts of one layer onto ranks that makes the load of the most loaded rank as small as the
    search finds.

    `load` has the load of each expert, ``[experts]``, in any unit; `slots` the number of slots of each rank. All slots are
    filled. The numbers of slots differ by at most one. There must be a slot for every expert, and no rank may have more slots
    than there are experts.
    """
    copies = replicate(load, sum(slots), len(slots))
    best = _search(load, _heaviest_first(load / copies, copies, slots))
    close, greedy = least_load(load, slots) * _CLOSE_ENOUGH, _greedy_load(load, slots) * (1 + _GAIN)
    source = np.random.default_rng(0)
    for attempt in range(_MOST_SHUFFLES):
        if best.most <= greedy and (best.most <= close or attempt >= _SHUFFLES):
            break
        found = _search(load, _shuffled(best.holds, source))
        if found.most <= best.most * (1 + _GAIN):
            best = found
    return best


def replicate(load: Loads, physical: int, ranks: int) -> SlotCounts:
    """Returns the number of copies of each expert, ``[experts]``, `physical` in total: at least 1, at most `ranks`.

    `load` has the load of each expert, ``[experts]``. Each further copy goes to the expert whose copies are heaviest, among
    equals to the one with the fewest copies. No other numbers make the heaviest copy lighter.
    """
    copies = np.ones(len(load), dtype=np.int64)
    for _ in range(physical - len(load)):
        share = np.where(copies < ranks, load / copies, -1.0)
        heaviest = np.flatnonzero(share == share.max())
        copies[heaviest[np.argmin(copies[heaviest])]] += 1
    return copies


def rank_loads(load: Loads, holds: Holds) -> Loads:
    """Returns the load of each rank, ``[ranks]``, given the load of each expert, ``[experts]``, and which rank holds which
    experts, ``[ranks, experts]``: the ranks that hold an expert share its load evenly."""
    return np.asarray(holds @ (load / holds.sum(axis=0)), dtype=np.float64)


def _heaviest_first(share: Loads, copies: SlotCounts, slots: Sequence[int]) -> Holds:
    """Returns the greedy packing: each expert's copies on the least loaded ranks with free slots, heaviest copies first."""
    room = np.array(slots)
    loads = np.zeros(len(slots))
    holds = np.zeros((len(slots), len(share)), dtype=bool)
    for expert in np.lexsort((np.arange(len(share)), -copies, -share)):
        wanted = copies[expert]
        ranks = np.lexsort((np.arange(len(slots)), -room, loads))
        chosen = ranks[room[ranks] > 0][:wanted]
        holds[chosen, expert] = True
        room[chosen] -= 1
        loads[chosen] += share[expert]
        for _ in range(wanted - len(chosen)):
            _make_room(holds, room, expert)
            loads = holds @ share
    return holds


def _greedy_load(load: Loads, slots: Sequence[int]) -> float:
    """Returns the maximum load of a plain greedy packing, in which a rank may hold several copies of one expert.

    Each copy, the heaviest first, goes to the least loaded rank with a free slot.
    """
    copies = replicate(load, sum(slots), sum(slots))
    share = load / copies
    room, loads = list(slots), [0.0] * len(slots)
    for copy in np.sort(np.repeat(share, copies))[::-1].tolist():
        _, rank = min((held, rank) for rank, held in enumerate(loads) if room[rank])
        room[rank] -= 1
        loads[rank] += copy
    return max(loads)


def _make_room(holds: Holds, room: SlotCounts, expert: int) -> None:
    """Adds a copy of an expert that all ranks with free slots already hold: a full rank takes it and passes another one on.

    The full rank holds at least as many experts as the rank with a free slot, but not this one, so it has one that the other
    rank lacks.
    """
    roomy = int(np.argmax(room))
    full = int(np.flatnonzero((room == 0) & ~holds[:, expert])[0])
    passed_on = int(np.flatnonzero(holds[full] & ~holds[roomy])[0])
    holds[full, [passed_on, expert]] = False, True
    holds[roomy, passed_on] = True
    room[roomy] -= 1


def _search(load: Loads, holds: Holds) -> Packing:
    """Improves a packing by local search until no step lowers the maximum load."""
    while True:
        copies = holds.sum(axis=0)
        share = load / copies
        loads = holds @ share
        step = _best_swap(share, holds, loads)
        if step is None:
            step = _best_two_swaps(share, holds, loads)
        if step is None:
            step = _best_new_copy(load, copies, holds, loads)
        if step is None:
            return Packing(holds, loads)
        holds = step


def _best_swap(share: Loads, holds: Holds, loads: Loads) -> Holds | None:
    """Returns the packing after the best swap of a copy of the most loaded rank with one of another rank, or None.

    The best swap minimises the larger of the two ranks' loads. None if no swap lowers the maximum load.
    """
    most = int(np.argmax(loads))
    ranks, experts = np.nonzero(holds)
    mine = np.flatnonzero(holds[most])
    given = share[mine][:, None] - share[experts]
    after = np.maximum(loads[most] - given, loads[ranks] + given)
    after[:, holds[most, experts]] = np.inf
    after[holds[ranks][:, mine].T] = np.inf
    row, column = divmod(int(np.argmin(after)), len(ranks))
    if after[row, column] >= loads[most] * (1 - _GAIN):
        return None
    return _swapped(holds, (most, int(mine[row])), (int(ranks[column]), int(experts[column])))


def _best_two_swaps(share: Loads, holds: Holds, loads: Loads) -> Holds | None:
    """Returns the packing after the best exchange of two copies of the most loaded rank for two of a light one, or None.

    The moved load should be half the difference between the two ranks. Each single swap moves some load; for each one, binary
    search in the sorted list of all swaps finds the second swap that completes it best.
    """
    most = int(np.argmax(loads))
    limit, found = loads[most] * (1 - _GAIN), None
    for other in np.argsort(loads, kind="stable")[:_LIGHTEST]:
        mine, theirs = np.flatnonzero(holds[most] & ~holds[other]), np.flatnonzero(holds[other] & ~holds[most])
        if min(len(mine), len(theirs)) < 2:
            continue
        moved = (share[mine][:, None] - share[theirs]).ravel()
        order = np.argsort(moved, kind="stable")
        nearest = np.searchsorted(moved[order], (loads[most] - loads[other]) / 2 - moved)
        for second in (order[np.minimum(nearest, len(order) - 1)], order[np.maximum(nearest - 1, 0)]):
            rows, columns = np.divmod(np.stack([np.arange(len(moved)), second]), len(theirs))
            after = np.maximum(loads[most] - moved - moved[second], loads[other] + moved + moved[second])
            after[(rows[0] == rows[1]) | (columns[0] == columns[1])] = np.inf
            best = int(np.argmin(after))
            if after[best] < limit:
                limit, found = after[best], (int(other), mine[rows[:, best]], theirs[columns[:, best]])
    if found is None:
        return None
    other, given, taken = found
    changed = holds.copy()
    changed[most, given], changed[other, taken] = False, False
    changed[most, taken], changed[other, given] = True, True
    return changed


def _swapped(holds: Holds, one: tuple[int, int], other: tuple[int, int]) -> Holds:
    """Returns the packing after two (rank, expert) pairs exchanged their experts."""
    found = holds.copy()
    found[one] = found[other] = False
    found[one[0], other[1]] = found[other[0], one[1]] = True
    return found


def _best_new_copy(load: Loads, copies: SlotCounts, holds: Holds, loads: Loads) -> Holds | None:
    """Returns the packing after the best change of a slot from a replicated expert to another expert, or None.

    Either the other expert is also on the most loaded rank, whose copy then becomes lighter, or the slot is on that rank.
    """
    most = int(np.argmax(loads))
    ranks, gone = np.nonzero(holds & (copies > 1))
    there = ranks == most
    mine, others = np.flatnonzero(holds[most]), np.flatnonzero(~holds[most])
    rank = np.concatenate([np.repeat(ranks[~there], len(mine)), np.full(there.sum() * len(others), most)])
    old = np.concatenate([np.repeat(gone[~there], len(mine)), np.repeat(gone[there], len(others))])
    new = np.concatenate([np.tile(mine, (~there).sum()), np.tile(others, there.sum())])
    possible = ~holds[rank, new] & (copies[new] < len(loads))
    rank, old, new = rank[possible], old[possible], new[possible]
    if not len(rank):
        return None
    fewer, more = load[old] / (copies[old] - 1), load[new] / (copies[new] + 1)
    grown = holds[:, old] * (fewer - load[old] / copies[old])
    after = loads[:, None] + grown - holds[:, new] * (load[new] / copies[new] - more)
    after[rank, np.arange(len(rank))] += more - fewer
    worst = after.max(axis=0)
    best = int(np.argmin(worst))
    if worst[best] >= loads[most] * (1 - _GAIN):
        return None
    changed = holds.copy()
    changed[rank[best], [old[best], new[best]]] = False, True
    return changed


def _shuffled(holds: Holds, source: np.random.Generator) -> Holds:
    """Returns the packing after random changes: swaps of two slots, or a slot of a replicated expert given to another one."""
    holds = holds.copy()
    for _ in range(_CHANGES_A_SHUFFLE):
        ranks, experts = np.nonzero(holds)
        one, other = source.integers(len(ranks), size=2)
        mine, theirs = (ranks[one], experts[one]), (ranks[other], experts[other])
        if holds[mine[0], theirs[1]]:
            continue
        if not holds[theirs[0], mine[1]]:
            holds = _swapped(holds, mine, theirs)
        elif source.integers(2):
            holds[mine], holds[mine[0], theirs[1]] = False, True
    return holds
