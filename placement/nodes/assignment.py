"""Topology-aware bundle assignment: which node each placement-group bundle of a replica is assigned to.

Bundles that communicate most are placed nearest to each other. A tp group is one bundle, and a bundle never spans nodes, so
only communication between bundles matters::

    in every layer    cp rings, and the ranks of one copy of the experts        keep inside a fast domain, then on one node
    once a step       a stage and the next, DP ranks of one replica             keep inside a fast domain
    never             replicas                                                  keep apart

The stages of a replica go to distinct nodes of a domain if it has enough nodes. The order of the fields of `Crossings` sets the
priorities. The search is a depth-first branch and bound that tries the cheapest node first. It returns the optimum on small
clusters, and the best assignment found within its budget otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from placement.layout import mesh
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec
from placement.nodes.hardware import ClusterSpec

_BUDGET = 5_000
"""Maximum number of nodes that the search tries."""

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, order=True)
class Crossings:
    """The cost of an assignment: boundaries that its groups cross. Lower is better; the first differing field decides.

    A group of bundles counts one less than the number of domains, racks and zones (or of nodes) that it spans.
    """

    far_groups: int = 0
    """Slow links crossed by groups that communicate in every layer."""
    far_hops: int = 0
    """Slow links crossed by stage boundaries and between DP ranks."""
    near_groups: int = 0
    """Node boundaries crossed by groups that communicate in every layer, whatever the domain."""
    shared_stages: int = 0
    """Number of stages on a node that also has another stage of the same replica."""
    spread: int = 0
    """Number of nodes of a stage beyond its first."""
    shared_replicas: int = 0
    """Number of nodes that also serve another replica."""

    def __add__(self, other: Crossings) -> Crossings:
        return Crossings(*(a + b for a, b in zip(self.as_tuple(), other.as_tuple(), strict=True)))

    def as_tuple(self) -> tuple[int, ...]:
        """Returns the fields, in order of priority."""
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
    """The node of each bundle of one replica, as an index into `ClusterSpec.nodes`."""

    nodes: tuple[int, ...]
    crossings: Crossings

    def node_of_rank(self, layout: Layout, world_rank: int) -> int:
        """Returns the node of a world rank of this replica, as an index into `ClusterSpec.nodes`. Raises `IndexError` if the
        replica has no such rank."""
        return self.nodes[world_rank // layout.tp]


def assign_bundles(
    layout: Layout,
    spec: ModelSpec,
    cluster: ClusterSpec,
    free: Sequence[int] | None = None,
    others: Collection[int] = (),
    home: int | None = None,
) -> BundleAssignment | None:
    """Returns the assignment of one replica's bundles (one per tp group) to nodes, or None if they do not fit into the `free`
    slots.

    `free` has the free slots of each node of `cluster`; None: all slots. `others` are the indices of the nodes that serve other
    replicas, which are avoided if that costs nothing else. `home` is the index of the node preferred for the first bundle among
    nodes of equal cost. The search has a budget: on large clusters the result may not be the optimum.
    """
    slots = [node.slots for node in cluster.nodes] if free is None else free
    room = [count // layout.tp for count in slots]
    if sum(room) < layout.world // layout.tp:
        return None
    return _Search(layout, talkers(layout, spec), dp_groups(layout), cluster, room, frozenset(others), home).best()


def assign_replicas(layout: Layout, spec: ModelSpec, cluster: ClusterSpec) -> list[BundleAssignment] | None:
    """Returns the assignment of bundles to nodes of every replica, assigned in turn on an idle cluster; None if they do not all
    fit."""
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
    """Returns the groups of bundles, by index in the replica, that communicate in every layer: cp groups, and for an MoE model
    the ranks of one copy of the experts. Groups of one bundle are left out."""
    axes = [axis for axis in mesh.talking_axes(spec) if axis in ("cp", "moe")]
    return _bundled(layout, axes)


def dp_groups(layout: Layout) -> Groups:
    """Returns the groups of bundles, by index in the replica, that belong to different DP ranks of one replica and communicate
    once a step. Groups of one bundle are left out."""
    return _bundled(layout, ["attn_dp"])


def _bundled(layout: Layout, axes: Sequence[str]) -> Groups:
    found = {tuple(sorted({rank // layout.tp for rank in group})): None for axis in axes for group in mesh.groups(layout, axis)}
    return tuple(group for group in found if len(group) > 1)


@dataclass
class _Search:
    """State of one branch-and-bound search. `assigned` has the node of each bundle assigned so far."""

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
        """Returns the best assignment found, or None if the bundles do not fit."""
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
        """Returns (added cost, node) for the next bundle, most promising first, with one node for each set of equal nodes."""
        unlike: dict[object, int] = {}
        for node, room in enumerate(self.room):
            if room:
                unlike.setdefault(self._likeness(node), node)
        priced = [(self._price(node), node) for node in unlike.values()]
        return sorted(
            priced, key=lambda option: (option[0], option[1] != self.home or bool(self.assigned), self._fit(option[1]))
        )

    def _price(self, node: int) -> Crossings:
        """Returns the cost that assigning the next bundle to this node adds."""
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
        """Returns at how many levels (zone, rack, domain) a node lies in a region that no member of a group lies in."""
        if not there:
            return 0
        return sum(all(self.regions[node][level] != self.regions[other][level] for other in there) for level in range(3))

    def _fit(self, node: int) -> tuple[int, int, int]:
        """Returns a best-fit sort key: the domain should hold the rest of the replica, the node that of the stage."""
        domain = sum(room for other, room in enumerate(self.room) if self.regions[other] == self.regions[node])
        left = self.total - len(self.assigned)
        of_stage = self.per_stage - len(self.assigned) % self.per_stage
        return _tightness(domain, left), _tightness(self.room[node], of_stage), node

    def _likeness(self, node: int) -> object:
        """Returns a key that is equal for nodes between which the search need not distinguish."""
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
