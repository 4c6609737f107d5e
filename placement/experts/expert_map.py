"""The expert map (EPLB): which logical expert each physical slot holds, layer by layer.

The slots of the `ep` ranks of one MoE copy are numbered consecutively, rank after rank. Ten experts and two redundant ones on
four ranks, initially (`initial`), and packed for a load in which expert 0 runs half of all tokens (`place`)::

    rank          0           1           2           3
    slots         0  1  2     3  4  5     6  7  8     9 10 11
    initially     0  1  2     3  4  5     6  7  8     9  0  1
    by load       0  4  7     0  5  8     0  6  9     1  2  3      copies of expert 0: slots 0, 3, 6

The number of experts need not be divisible by the number of ranks: ten experts without redundant ones are 3, 3, 2 and 2 slots
(`placement.layout.partition.counts`), and no copies are added to fill a rank. Tokens use the copies of an expert round robin
(`ExpertMap.slot_of`), by offsets that follow from the step plan: all ranks choose the same copy, and copies share a load
evenly.
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
"""Load of each expert, ``[layers][experts]``: its number of tokens, or any other measure of work."""


@dataclass(frozen=True)
class ExpertMap:
    """The expert in every slot of every layer.

    `slots` has the number of slots of each rank, `experts` the expert of each slot, ``[layers][slots]``. Raises `ValueError` if
    an expert has no slot, or if a layer has a wrong number of slots.
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
        """Number of ranks of the ep group."""
        return len(self.slots)

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Range of slot numbers of each rank; slots are numbered consecutively, rank after rank."""
        return tuple(ranges(self.slots))

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(self.slots)]

    def rank_of(self, slot: int) -> int:
        """Returns the ep rank that has the slot with this number."""
        return bisect_right(self._starts, slot) - 1

    @cached_property
    def holders(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Slots that hold each expert, in order, ``[layers][experts]``: the inverse of `experts`."""
        found = []
        for row in self.experts:
            slots: list[list[int]] = [[] for _ in range(self.num_experts)]
            for slot, expert in enumerate(row):
                slots[expert].append(slot)
            found.append(tuple(map(tuple, slots)))
        return tuple(found)

    def copies(self, layer: int) -> tuple[int, ...]:
        """Returns, for each expert, the number of slots that hold it in `layer`, an index into the map's layers."""
        return tuple(map(len, self.holders[layer]))

    def on_rank(self, layer: int, rank: int) -> tuple[int, ...]:
        """Returns the experts in the slots of an ep rank, in slot order; `layer` is an index into the map's layers."""
        return self.experts[layer][self.ranges[rank].start : self.ranges[rank].stop]

    def slot_of(self, layer: int, expert: int, copy_offset: int) -> int:
        """Returns the number of the slot that runs an expert for a token; `layer` is an index into the map's layers.

        `copy_offset` selects the copy round robin: the offset of the step plus the index of the token in the step.
        """
        slots = self.holders[layer][expert]
        return slots[copy_offset % len(slots)]


def slots_of_ranks(num_experts: int, ranks: int, redundant: int = 0) -> tuple[int, ...]:
    """Returns the number of slots of each of `ranks` ep ranks for `num_experts` experts and `redundant` further copies:
    descending, differing by at most one."""
    return tuple(counts(num_experts + redundant, ranks))


def initial(num_layers: int, num_experts: int, ranks: int, redundant: int = 0) -> ExpertMap:
    """Returns the map used before any load is known: in every layer the experts in order, followed by copies of the first
    `redundant` ones.

    Without redundant experts each of the `ranks` ep ranks holds a contiguous range of experts. Raises `ValueError` if there are
    fewer experts and copies than ranks, or more than all experts on every rank.
    """
    _check(num_experts, ranks, redundant)
    row = tuple(slot % num_experts for slot in range(num_experts + redundant))
    return ExpertMap(num_experts, slots_of_ranks(num_experts, ranks, redundant), (row,) * num_layers)


def map_of(moe: MoESpec, layout: Layout) -> ExpertMap:
    """Returns the initial map of a model, with one layer that stands for all of them. Raises `ValueError` if the experts and
    redundant copies do not fill the ep ranks, or exceed all experts on every rank."""
    return initial(1, moe.num_experts, layout.ep, layout.redundant_experts)


def place(load: ExpertLoads, ranks: int, redundant: int = 0, nodes: int = 1, groups: int = 1) -> ExpertMap:
    """Returns the map that spreads a load most evenly over `ranks` ep ranks, for each layer separately
    (`placement.experts.packing`).

    `load` has the load of each expert, ``[layers][experts]``, in any unit; `redundant` is the number of copies beside the
    experts, `nodes` the number of nodes with equally many consecutive ranks. `groups` is the number of expert groups of
    group-limited routing: equal runs of experts, of which a token can use only a few. If groups, ranks and slots are divisible
    by `nodes`, all experts of a group and their copies stay on one node, so that a token is sent to few nodes. Raises
    `ValueError` if there are fewer experts and copies than ranks, or more than all experts on every rank.
    """
    num_experts = len(load[0])
    _check(num_experts, ranks, redundant)
    slots = slots_of_ranks(num_experts, ranks, redundant)
    by_node = nodes if stays_on_nodes(num_experts, ranks, redundant, nodes, groups) else 1
    rows = (_placed(np.array(row, dtype=np.float64), slots, by_node, groups) for row in load)
    return ExpertMap(num_experts, slots, tuple(rows))


def stays_on_nodes(num_experts: int, ranks: int, redundant: int, nodes: int, groups: int) -> bool:
    """Whether `place` keeps each expert group on one node: there are several nodes, all numbers are divisible, and no rank
    would have to hold an expert twice.

    The parameters are those of `place`, with the number of experts instead of their load.
    """
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
    """Returns the load of each ep rank in one layer (an index into the layers of the map `placed`) if the copies of an expert
    share its load evenly. `load` has the load of each expert, ``[experts]``."""
    sums = [0.0] * placed.num_ranks
    for rank in range(placed.num_ranks):
        sums[rank] = sum(load[expert] / len(placed.holders[layer][expert]) for expert in placed.on_rank(layer, rank))
    return sums


def balancedness(placed: ExpertMap, load: ExpertLoads) -> list[float]:
    """Returns, for each layer, ``mean / max`` of the ranks' loads under the map `placed`: the fraction of their time that is
    used; 1 without load. `load` is ``[layers][experts]``."""
    return [_evenness(rank_loads_of(placed, layer, row)) for layer, row in enumerate(load)]


def bound(load: ExpertLoads, slots: Sequence[int]) -> list[float]:
    """Returns, for each layer of `load` (``[layers][experts]``), an upper bound of `balancedness`, valid for every map with
    `slots` slots on each rank (see `least_load`)."""
    found = []
    for row in load:
        least = least_load(np.array(row, dtype=np.float64), slots)
        found.append(sum(row) / len(slots) / least if least else 1.0)
    return found


def surviving(placed: ExpertMap, lost: Collection[int]) -> list[frozenset[int]]:
    """Returns, for each layer, the experts that remain on some rank if the `lost` ep ranks fail. The other experts must be
    reloaded."""
    kept = [rank for rank in range(placed.num_ranks) if rank not in lost]
    return [
        frozenset(expert for rank in kept for expert in placed.on_rank(layer, rank)) for layer in range(len(placed.experts))
    ]


def _evenness(loads: Sequence[float]) -> float:
    return sum(loads) / len(loads) / max(loads) if max(loads) else 1.0
