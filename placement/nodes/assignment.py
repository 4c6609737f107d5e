"""Which node each bundle of a replica sits on, so that what talks most sits nearest.

Only bundles (tp groups) are assigned: a tp group is one bundle, and a bundle never leaves its node. What else talks::

    in every layer    cp rings, and the ranks of one copy of the experts        keep inside a fast domain, then on one node
    once a step       a stage and the next, DP ranks of one replica             keep inside a fast domain
    never             replicas                                                  keep apart

Stages go to distinct nodes of a domain where there are enough. What comes first is the order of the fields of `Crossings`; the
search (depth first, cheapest node first, never deeper than the best found) returns the best there is while the cluster is
small, and the best it found in its budget otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from placement.layout import mesh
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec
from placement.nodes.hardware import ClusterSpec

_BUDGET = 5_000
"""Nodes tried at most."""

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, order=True)
class Crossings:
    """What an assignment crosses; less is better, and the first field that differs decides.

    A group of bundles counts one less than the domains (racks, zones; then nodes) it lies in.
    """

    far_groups: int = 0
    """Groups that talk in every layer, over slow links."""
    far_hops: int = 0
    """Stage boundaries and DP ranks over slow links."""
    near_groups: int = 0
    """Groups that talk in every layer, over nodes of one fast domain or several."""
    shared_stages: int = 0
    """Stages on a node that has another stage of the same replica."""
    spread: int = 0
    """Nodes of a stage beyond its first."""
    shared_replicas: int = 0
    """Nodes that serve another replica too."""

    def __add__(self, other: Crossings) -> Crossings:
        return Crossings(*(a + b for a, b in zip(self.as_tuple(), other.as_tuple(), strict=True)))

    def as_tuple(self) -> tuple[int, ...]:
        """The fields, in order."""
        return (
            self.far_groups,
            self.far_hops,
            self.near_groups,
            self.shared_stages,
            self.spread,
            self.shared_replicas,
        )


@dataclass(frozen=True)
class BundleAssignment:
    """The node (by its index in the cluster) of each bundle of one replica."""

    nodes: tuple[int, ...]
    crossings: Crossings

    def node_of_rank(self, layout: Layout, world_rank: int) -> int:
        """The node of a world rank."""
        return self.nodes[world_rank // layout.tp]


def assign_bundles(
    layout: Layout,
    spec: ModelSpec,
    cluster: ClusterSpec,
    free: Sequence[int] | None = None,
    others: Collection[int] = (),
    home: int | None = None,
) -> BundleAssignment | None:
    """The nodes of one replica's bundles, or None where `free` slots (by node; all, unless given) have no room for its bundles.

    `others`: nodes that serve other replicas. `home`: the node to begin on where nothing speaks against it.
    """
    slots = [node.slots for node in cluster.nodes] if free is None else free
    room = [count // layout.tp for count in slots]
    if sum(room) < layout.world // layout.tp:
        return None
    return _Search(layout, talkers(layout, spec), dp_groups(layout), cluster, room, frozenset(others), home).best()


def assign_replicas(layout: Layout, spec: ModelSpec, cluster: ClusterSpec) -> list[BundleAssignment] | None:
    """The assignment of every replica, one after the other on an idle cluster; None where they do not fit together."""
    free = [node.slots for node in cluster.nodes]
    assignments: list[BundleAssignment] = []
    for _ in range(layout.replicas):
        taken = {node for assignment in assignments for node in assignment.nodes}
        assignment = assign_bundles(layout, spec, cluster, free, taken)
        if assignment is None:
            return None
        for node in assignment.nodes:
            free[node] -= layout.tp
        assignments.append(assignment)
    return assignments


def talkers(layout: Layout, spec: ModelSpec) -> Groups:
    """Groups of bundles that talk in every layer."""
    axes = [axis for axis in mesh.talking_axes(spec) if axis in ("cp", "moe")]
    return _bundled(layout, axes)


def dp_groups(layout: Layout) -> Groups:
    """Groups of bundles that are DP ranks of one replica."""
    return _bundled(layout, ["attn_dp"])


def _bundled(layout: Layout, axes: Sequence[str]) -> Groups:
    found = {tuple(sorted({rank // layout.tp for rank in group})): None for axis in axes for group in mesh.groups(layout, axis)}
    return tuple(group for group in found if len(group) > 1)


@dataclass
class _Search:
    """One search. `assigned` is the assignment so far, bundle by bundle; everything else follows from it."""

    layout: Layout
    groups: Groups
    dp_groups: Groups
    cluster: ClusterSpec
    room: list[int]
    others: frozenset[int]
    home: int | None
    assigned: list[int] = field(default_factory=list)
    found: BundleAssignment | None = None
    budget: int = _BUDGET

    def __post_init__(self) -> None:
        self.total = self.layout.world // self.layout.tp
        self.per_stage = self.total // self.layout.pp
        paths = [node.path for node in self.cluster.nodes]
        self.regions = [tuple(path[: level + 1] for level in range(len(path))) for path in paths]
        self.groups_of = [[group for group in self.groups if bundle in group] for bundle in range(self.total)]
        self.dp_groups_of = [[group for group in self.dp_groups if bundle in group] for bundle in range(self.total)]

    def best(self) -> BundleAssignment | None:
        self._go_on(Crossings())
        return self.found

    def _go_on(self, cost: Crossings) -> None:
        if len(self.assigned) == self.total:
            self.found = BundleAssignment(tuple(self.assigned), cost)
            return
        for more, node in self._options():
            if self.found is not None and (self.budget <= 0 or cost + more >= self.found.crossings):
                continue
            self.budget -= 1
            self.room[node] -= 1
            self.assigned.append(node)
            self._go_on(cost + more)
            self.assigned.pop()
            self.room[node] += 1

    def _options(self) -> list[tuple[Crossings, int]]:
        """Nodes for the next bundle, the most promising first; of nodes that are alike only one."""
        unlike: dict[object, int] = {}
        for node, room in enumerate(self.room):
            if room:
                unlike.setdefault(self._likeness(node), node)
        priced = [(self._price(node), node) for node in unlike.values()]
        return sorted(
            priced, key=lambda option: (option[0], option[1] != self.home or bool(self.assigned), self._fit(option[1]))
        )

    def _price(self, node: int) -> Crossings:
        """What the next bundle adds on this node."""
        bundle, stage = len(self.assigned), len(self.assigned) // self.per_stage
        before = bundle - self.per_stage
        mine = self.assigned[stage * self.per_stage :]
        earlier = self.assigned[: stage * self.per_stage]
        groups = [[self.assigned[other] for other in group if other < bundle] for group in self.groups_of[bundle]]
        hops = [[self.assigned[other] for other in group if other < bundle] for group in self.dp_groups_of[bundle]]
        hops += [[self.assigned[before]]] if before >= 0 else []
        return Crossings(
            far_groups=sum(self._new_regions(node, there) for there in groups),
            far_hops=sum(self._new_regions(node, there) for there in hops),
            near_groups=sum(bool(there) and node not in there for there in groups),
            shared_stages=int(node in earlier and node not in mine),
            spread=int(bool(mine) and node not in mine),
            shared_replicas=int(node in self.others and node not in self.assigned),
        )

    def _new_regions(self, node: int, there: Sequence[int]) -> int:
        """Levels (zone, rack, domain) at which a node adds a region to those of a group's members."""
        if not there:
            return 0
        return sum(all(self.regions[node][level] != self.regions[other][level] for other in there) for level in range(3))

    def _fit(self, node: int) -> tuple[int, int, int]:
        """How well what is left fits: first its domain holds the replica, then the node the stage; the tightest first."""
        domain = sum(room for other, room in enumerate(self.room) if self.regions[other] == self.regions[node])
        left = self.total - len(self.assigned)
        of_stage = self.per_stage - len(self.assigned) % self.per_stage
        return _tightness(domain, left), _tightness(self.room[node], of_stage), node

    def _likeness(self, node: int) -> object:
        """Equal for nodes that make no difference."""
        flags = (self.room[node], node in self.others, node == self.home)
        if node in self.assigned:
            return node
        if any(self.regions[other] == self.regions[node] for other in self.assigned):
            return self.regions[node], flags
        return self.regions[node][1], flags, tuple(sorted(self._profile(node)))

    def _profile(self, node: int) -> Iterator[tuple[int, bool, bool]]:
        for other, room in enumerate(self.room):
            if self.regions[other] == self.regions[node]:
                yield room, other in self.others, other == self.home


def _tightness(room: int, need: int) -> int:
    return room - need if room >= need else 1_000_000 + need - room
