"""Expert migration (EPLB): the transfers from one expert map to another, and the arrangement that needs the fewest.

Two maps are equivalent if they differ only in the order of a rank's slots, or by an exchange of ranks of one node that have the
same number of slots. `settled` picks an equivalent map with the fewest transfers; `moves` lists the transfers::

    old   rank 0: 0 1 2   rank 1: 3 4 0
    new   rank 0: 3 4 1   rank 1: 0 2 1      as packed: 4 experts come from the other rank
    settled       0 1 2           3 4 1      1 expert comes from the other rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.experts.expert_map import ExpertMap


@dataclass(frozen=True)
class ExpertTransfer:
    """The transfer of one expert of one layer from a slot of the old map to a slot of the new one.

    Within one rank (`is_local`) it is a copy in memory. A slot that one transfer writes may be read by another, so a layer's
    experts are received into buffers, and written to their slots once all transfers of the layer are complete.
    """

    layer: int
    expert: int
    source_rank: int
    source_slot: int
    target_rank: int
    target_slot: int

    @property
    def is_local(self) -> bool:
        """Whether source and target are on the same rank, so that nothing is sent."""
        return self.source_rank == self.target_rank


def moves(old: ExpertMap, new: ExpertMap) -> list[ExpertTransfer]:
    """Returns the transfers from the map `old` to the map `new`, layer by layer: one for every slot whose expert changes.

    A rank that already holds the expert copies it. Otherwise the holder that has sent the fewest experts so far in this move
    sends it, the lowest rank among equals. Raises `ValueError` if the maps differ in layers, experts or slots per rank.
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
    """Returns the map `new` with its ranks and slots rearranged such that the fewest transfers from the map `old` are needed.

    `nodes` is the number of nodes with equally many consecutive ranks; ranks are exchanged only within their node. Raises
    `ValueError` if the maps differ in layers, experts or slots per rank.
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
    """Solves the linear assignment problem: returns the column assigned to each row of a square cost matrix, with the least sum
    of costs.

    The algorithm finds shortest augmenting paths with dual values (Jonker and Volgenant 1987), in ``O(n^3)``.
    """
    size = len(cost)
    row_value, column_value = np.zeros(size), np.zeros(size + 1)
    row_of = np.full(size + 1, -1)
    for row in range(size):
        row_of[size] = row  # the path starts at a column outside the matrix, assigned to the row that has none yet
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
    """Returns the sets of ranks on the same node with the same number of slots."""
    per_node = placed.num_ranks // nodes
    alike: dict[tuple[int, int], list[int]] = {}
    for rank, slots in enumerate(placed.slots):
        alike.setdefault((rank // per_node, slots), []).append(rank)
    return list(alike.values())


def _in_place(old: Sequence[int], new: Sequence[int]) -> list[int]:
    """Returns the new experts of a rank in an order that keeps experts it already holds in their slots."""
    coming = [expert for expert in new if expert not in old]
    return [expert if expert in new else coming.pop(0) for expert in old]


def _check_alike(old: ExpertMap, new: ExpertMap) -> None:
    if (old.num_experts, old.slots, len(old.experts)) != (new.num_experts, new.slots, len(new.experts)):
        raise ValueError(
            f"maps of other shapes: {len(old.experts)} layers, {old.num_experts} experts, slots {old.slots}; and "
            f"{len(new.experts)} layers, {new.num_experts} experts, slots {new.slots}"
        )
