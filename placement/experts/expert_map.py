"""Which experts a rank holds: the map from physical slots to logical experts, layer by layer.

The slots of the `ep` ranks of one MoE copy are numbered in a row, rank after rank. Ten experts and two redundant ones on four
ranks, at first (`initial`), and packed for a load in which expert 0 runs half of all tokens (`place`)::

    rank          0           1           2           3
    slots         0  1  2     3  4  5     6  7  8     9 10 11
    at first      0  1  2     3  4  5     6  7  8     9  0  1
    by load       0  4  7     0  5  8     0  6  9     1  2  3      copies of expert 0: slots 0, 3, 6

Numbers need not divide: ten experts without redundant ones are 3, 3, 2 and 2 slots (`placement.layout.partition.counts`), and
no copies are made up to fill a rank. Tokens go round robin over the copies of an expert (`ExpertMap.slot_of`), by numbers that
every rank finds in the plan: so all choose the same, and copies share a load evenly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from placement.experts.bound import least_load
from placement.experts.packing import Loads, pack
from placement.layout.layout import Layout
from placement.layout.partition import counts, ranges
from placement.model.moe_spec import MoESpec

ExpertLoads = Sequence[Sequence[float]]
"""Tokens (or any other measure of work) of each expert, [layers][experts]."""


@dataclass(frozen=True)
class ExpertMap:
    """The expert in every slot of every layer. `slots` are the slots of each rank, `experts` [layers][slots].

    Raises `ValueError` where an expert has no slot, or a layer another number of slots.
    """

    num_experts: int
    slots: tuple[int, ...]
    experts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for layer, row in enumerate(self.experts):
            if len(row) != sum(self.slots):
                raise ValueError(f"layer {layer} of the map has {len(row)} slots, but the ranks have {sum(self.slots)}")
            if set(row) != set(range(self.num_experts)):
                missing = sorted(set(range(self.num_experts)) - set(row))
                unknown = sorted(set(row) - set(range(self.num_experts)))
                raise ValueError(f"layer {layer} of the map lacks experts {missing}, and has unknown experts {unknown}")

    @property
    def num_ranks(self) -> int:
        """Ranks of the `ep` group."""
        return len(self.slots)

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """The slots of each rank."""
        return tuple(ranges(self.slots))

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(self.slots)]

    def rank_of(self, slot: int) -> int:
        """The rank a slot is on."""
        return bisect_right(self._starts, slot) - 1

    @cached_property
    def holders(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """[layers][experts]: the slots that hold an expert, in order. The inverse of `experts`."""
        found = []
        for row in self.experts:
            slots: list[list[int]] = [[] for _ in range(self.num_experts)]
            for slot, expert in enumerate(row):
                slots[expert].append(slot)
            found.append(tuple(map(tuple, slots)))
        return tuple(found)

    def copies(self, layer: int) -> tuple[int, ...]:
        """How many slots hold each expert."""
        return tuple(map(len, self.holders[layer]))

    def on_rank(self, layer: int, rank: int) -> tuple[int, ...]:
        """The experts of a rank's slots, in order."""
        return self.experts[layer][self.ranges[rank].start : self.ranges[rank].stop]

    def slot_of(self, layer: int, expert: int, copy_offset: int) -> int:
        """The slot that runs an expert of a token, by the token's offset: that of the step, and its own number in it."""
        slots = self.holders[layer][expert]
        return slots[copy_offset % len(slots)]


def slots_of_ranks(num_experts: int, ranks: int, redundant: int = 0) -> tuple[int, ...]:
    """Slots of each rank for all experts and `redundant` more copies: numbers that differ by at most one, falling."""
    return tuple(counts(num_experts + redundant, ranks))


def initial(num_layers: int, num_experts: int, ranks: int, redundant: int = 0) -> ExpertMap:
    """The map before any load is known: experts in order, then the first ones again. Without copies a rank has a range."""
    _check(num_experts, ranks, redundant)
    row = tuple(slot % num_experts for slot in range(num_experts + redundant))
    return ExpertMap(num_experts, slots_of_ranks(num_experts, ranks, redundant), (row,) * num_layers)


def map_of(moe: MoESpec, layout: Layout) -> ExpertMap:
    """The map a model starts with: one layer, which all are like."""
    return initial(1, moe.num_experts, layout.ep, layout.redundant_experts)


def place(load: ExpertLoads, ranks: int, redundant: int = 0, nodes: int = 1, groups: int = 1) -> ExpertMap:
    """The map that spreads a load most evenly over the ranks (`placement.experts.packing`), each layer for itself.

    `groups` are those of group-limited routing: equal runs of experts, of which a token sees a few. Where they divide over
    `nodes`, and ranks and slots do too, a group stays whole on one node (its copies too), so that a token visits few nodes.
    """
    num_experts = len(load[0])
    _check(num_experts, ranks, redundant)
    slots = slots_of_ranks(num_experts, ranks, redundant)
    by_node = nodes if stays_on_nodes(num_experts, ranks, redundant, nodes, groups) else 1
    rows = (_placed(np.array(row, dtype=np.float64), slots, by_node, groups) for row in load)
    return ExpertMap(num_experts, slots, tuple(rows))


def stays_on_nodes(num_experts: int, ranks: int, redundant: int, nodes: int, groups: int) -> bool:
    """Whether groups of experts are kept whole on nodes: all numbers divide, and a node has no more copies than it can use."""
    physical = num_experts + redundant
    divides = groups % nodes == 0 and ranks % nodes == 0 and physical % ranks == 0 and num_experts % groups == 0
    return nodes > 1 and divides and physical // ranks <= num_experts // nodes


def _check(num_experts: int, ranks: int, redundant: int) -> None:
    if not ranks <= num_experts + redundant <= num_experts * ranks:
        raise ValueError(
            f"{num_experts} experts and {redundant} redundant ones cannot be on {ranks} ranks: there must be one for each "
            f"rank, and no more than all experts on every rank"
        )


def _placed(load: Loads, slots: tuple[int, ...], nodes: int, groups: int) -> tuple[int, ...]:
    size, per_node = len(load) // groups, len(slots) // nodes
    by_group = load[: groups * size].reshape(groups, size).sum(axis=1)
    row: list[int] = []
    on_nodes = pack(by_group, [groups // nodes] * nodes).holds if nodes > 1 else np.ones((1, groups), dtype=bool)
    for node, members in enumerate(on_nodes):
        experts = np.flatnonzero(np.repeat(members, size)) if nodes > 1 else np.arange(len(load))
        for holds in pack(load[experts], slots[node * per_node : (node + 1) * per_node]).holds:
            row += experts[holds].tolist()
    return tuple(row)


def rank_loads_of(placed: ExpertMap, layer: int, load: Sequence[float]) -> list[float]:
    """Load of each rank in a layer, when the copies of an expert share its load evenly."""
    sums = [0.0] * placed.num_ranks
    for rank in range(placed.num_ranks):
        sums[rank] = sum(load[expert] / len(placed.holders[layer][expert]) for expert in placed.on_rank(layer, rank))
    return sums


def balancedness(placed: ExpertMap, load: ExpertLoads) -> list[float]:
    """``mean / max`` of the ranks' loads in each layer: the part of the ranks' time that is used. 1 where there is no load."""
    return [_evenness(rank_loads_of(placed, layer, row)) for layer, row in enumerate(load)]


def bound(load: ExpertLoads, slots: Sequence[int]) -> list[float]:
    """What `balancedness` can be at most, layer by layer, with these slots, whatever the map (see `least_load`)."""
    found = []
    for row in load:
        least = least_load(np.array(row, dtype=np.float64), slots)
        found.append(sum(row) / len(slots) / least if least else 1.0)
    return found


def surviving(placed: ExpertMap, lost: Collection[int]) -> list[frozenset[int]]:
    """The experts of each layer that some rank still holds when the `lost` ranks are gone. The others must be loaded again."""
    kept = [rank for rank in range(placed.num_ranks) if rank not in lost]
    return [
        frozenset(expert for rank in kept for expert in placed.on_rank(layer, rank)) for layer in range(len(placed.experts))
    ]


def _evenness(loads: Sequence[float]) -> float:
    return sum(loads) / len(loads) / max(loads) if max(loads) else 1.0
