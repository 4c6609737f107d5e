"""From one map of experts to another: the transfers, and the arrangement of the new map that needs fewest.

Two maps are equally good when only the order of a rank's slots differs, or when ranks with as many slots on the same node
change places. `settled` picks, of all these, one with the fewest transfers; `moves` lists them::

    old   rank 0: 0 1 2   rank 1: 3 4 0
    new   rank 0: 3 4 1   rank 1: 0 2 1      as packed: 4 experts come from the other rank
    settled       0 1 2           3 4 1      1 does
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.experts.expert_map import ExpertMap


@dataclass(frozen=True)
class ExpertTransfer:
    """One expert of one layer goes from a slot of the old map to a slot of the new one.

    On one rank (`is_local`) it is a copy in memory. Slots that some transfer writes may be read by another: a layer's
    experts are received aside, and put in place when all of the layer's have come.
    """

    layer: int
    expert: int
    source_rank: int
    source_slot: int
    target_rank: int
    target_slot: int

    @property
    def is_local(self) -> bool:
        """Whether nothing goes on the wire."""
        return self.source_rank == self.target_rank


def moves(old: ExpertMap, new: ExpertMap) -> list[ExpertTransfer]:
    """The transfers from one map to another, layer by layer: one for every slot whose expert changes.

    A rank that holds the expert already copies it. Of other holders the one that has sent least so far in this move sends, the
    lowest among equals. Both maps must have the same slots.
    """
    _check_alike(old, new)
    sent = [0] * old.num_ranks
    found = []
    for layer, (before, after) in enumerate(zip(old.experts, new.experts, strict=True)):
        for slot in range(len(after)):
            if before[slot] == after[slot]:
                continue
            target = new.rank_of(slot)
            holders = {old.rank_of(at): at for at in reversed(old.holders[layer][after[slot]])}
            source = target if target in holders else min(holders, key=lambda rank: (sent[rank], rank))
            sent[source] += source != target
            found.append(ExpertTransfer(layer, after[slot], source, holders[source], target, slot))
    return found


def settled(old: ExpertMap, new: ExpertMap, nodes: int = 1) -> ExpertMap:
    """The new map with ranks and slots in the order that needs the fewest transfers from the old one.

    With `nodes` > 1 ranks change places only within their node.
    """
    _check_alike(old, new)
    rows = []
    for layer in range(len(new.experts)):
        row: dict[int, list[int]] = {}
        for members in _interchangeable(new, nodes):
            old_sets, new_sets = ([placed.on_rank(layer, rank) for rank in members] for placed in (old, new))
            kept = np.array([[len(set(mine) & set(theirs)) for theirs in new_sets] for mine in old_sets], dtype=np.float64)
            for rank, mine, chosen in zip(members, old_sets, assignment(-kept), strict=True):
                row[rank] = _in_place(mine, new_sets[chosen])
        rows.append(tuple(expert for rank in range(new.num_ranks) for expert in row[rank]))
    return ExpertMap(new.num_experts, new.slots, tuple(rows))


def assignment(cost: NDArray[np.float64]) -> list[int]:
    """The column of each row of a square matrix, each column once, so that the costs add up to the least.

    Shortest augmenting paths with dual values (Jonker and Volgenant 1987): ``O(n^3)``.
    """
    size = len(cost)
    row_value, column_value = np.zeros(size), np.zeros(size + 1)
    row_of = np.full(size + 1, -1)
    for row in range(size):
        row_of[size] = row  # the path starts at a column outside the matrix, held by the row that has none yet
        distance, before = np.full(size, np.inf), np.full(size, size)
        done = np.zeros(size + 1, dtype=bool)
        column = size
        while row_of[column] >= 0:
            done[column] = True
            here = row_of[column]
            reduced = cost[here] - row_value[here] - column_value[:size]
            nearer = ~done[:size] & (reduced < distance)
            distance[nearer], before[nearer] = reduced[nearer], column
            nearest = int(np.argmin(np.where(done[:size], np.inf, distance)))
            step = distance[nearest]
            row_value[row_of[done]] += step
            column_value[done] -= step
            distance[~done[:size]] -= step
            column = nearest
        while column != size:
            row_of[column], column = row_of[before[column]], int(before[column])
    return [int(column) for column in np.argsort(row_of[:size])]


def _interchangeable(placed: ExpertMap, nodes: int) -> list[list[int]]:
    """Ranks of one node with as many slots as each other."""
    per_node = placed.num_ranks // nodes
    alike: dict[tuple[int, int], list[int]] = {}
    for rank, slots in enumerate(placed.slots):
        alike.setdefault((rank // per_node, slots), []).append(rank)
    return list(alike.values())


def _in_place(old: Sequence[int], new: Sequence[int]) -> list[int]:
    """The new experts of a rank, those it holds already in their slots."""
    coming = [expert for expert in new if expert not in old]
    return [expert if expert in new else coming.pop(0) for expert in old]


def _check_alike(old: ExpertMap, new: ExpertMap) -> None:
    if (old.num_experts, old.slots, len(old.experts)) != (new.num_experts, new.slots, len(new.experts)):
        raise ValueError(
            f"maps of other shapes: {len(old.experts)} layers, {old.num_experts} experts, slots {old.slots}; and "
            f"{len(new.experts)} layers, {new.num_experts} experts, slots {new.slots}"
        )
