"""Ray placement groups for ranks: one placement group per replica, one bundle per tensor-parallel (TP) group.

Ray never splits a bundle over nodes, so a TP group is always inside one node. `placement.nodes.assignment` chooses the node of
each bundle from the free resources, and the bundle is requested on that node by its id.

    inspect the nodes ──→ impossible ──→ refuse, or, if nodes may still start, wait with the demand announced to Ray
          ↑               busy       ──→ wait
          └────────────── assigned   ──→ reserve; if the resources were taken meanwhile, inspect again
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.experimental.internal_kv import _internal_kv_exists, _internal_kv_put
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from actors.wire.rank_config import Device
from cluster.embedded.local import NAMESPACE
from cluster.nodes.discover import available, discover
from cluster.nodes.topology import RAY_DOMAIN, domain_slots, free_slots, open_to, pool_selector
from cluster.replica.placement_wait import PlacementError, PlacementWait
from cluster.replica.settings import ReplicaSettings
from placement.cost.crossings import crossing_lines, link_loads, nodes_of_ranks
from placement.cost.step_shape import StepShape
from placement.layout.layout import Layout
from placement.nodes.assignment import BundleAssignment, assign_bundles
from placement.nodes.bundles import Bundle, bundle_of, bundles, counted, impossible
from placement.nodes.hardware import ClusterSpec

log = logging.getLogger("shardwright.placement")

NODE_ID = "ray.io/node-id"
_LOST_NODES_S = 24 * 3600.0
"""Seconds that a replica which has had a placement before waits for lost nodes to come back."""
_RESERVE_S = 3.0
"""Seconds to wait for a reservation. Free bundles are reserved in milliseconds, so a longer wait means that they were taken."""


@dataclass(frozen=True)
class ReservedBundles:
    """The reserved bundles of a replica: the bundle of each rank, and the Ray node id of each bundle."""

    group: PlacementGroup
    bundle_of_rank: tuple[int, ...]
    nodes: tuple[str, ...]

    def node_of(self, world_rank: int) -> str:
        """Returns the Ray id of the node that the rank `world_rank` must run on."""
        return self.nodes[self.bundle_of_rank[world_rank]]

    def are_whole(self) -> bool:
        """Returns whether every bundle is still reserved, that is, no node of the placement group is lost."""
        return str(placement_group_table(self.group).get("state")) == "CREATED"

    def free(self) -> None:
        """Remove the placement group, which frees its resources. Ray kills any rank that still runs in it."""
        remove_placement_group(self.group)


def reserve(settings: ReplicaSettings, home: str | None = None) -> ReservedBundles:
    """Reserve the bundles of one replica (one per TP group) on the connected cluster. They are freed when the calling process
    ends.

    If the nodes have the resources but are busy, the call waits for them. If they lack the resources, the request is refused at
    once, unless the deployment has had a placement before or nodes are still to start (``settings.nodes_wait_s``). `home` is
    the Ray id of the node on which to place the first bundle if possible.

    Returns the reservation. Raises `PlacementError` if the resources are lacking, or are not free in time, or if Ray places a
    bundle on another node.
    """
    wanted, again = bundles(settings.layout, settings.device), _had_placement(settings)
    wait = PlacementWait(_LOST_NODES_S if again else max(settings.start_timeout_s, settings.nodes_wait_s))
    demand: PlacementGroup | None = None
    try:
        while True:
            reason = impossible(wanted, node_resources(settings.pool))
            if reason is None:
                if demand is not None:
                    remove_placement_group(demand)
                    demand = None
                found = _try_reserve(settings, wanted, home)
                if found is not None:
                    _remember(settings)
                    return found
                wait.poll(f"no room for {counted(wanted)}: the cluster is busy")
            elif again or settings.nodes_wait_s:
                demand = demand or _demand(settings, wanted)
                wait.poll(f"nodes are missing: {reason}")
            else:
                raise PlacementError(reason)
    finally:
        wait.close()
        if demand is not None:
            remove_placement_group(demand)


def node_resources(pool: str = "") -> dict[str, dict[str, float]]:
    """Returns the total resources (not those free now) of every live node that `pool` may use (empty: every live node), under
    Ray's resource names.

    The keys are the nodes' addresses and ids, as in ``10.0.0.2/1f3c9a2b``.
    """
    nodes = [node for node in open_to(ray.nodes(), pool) if node["Alive"]]
    return {f"{node['NodeManagerAddress']}/{node['NodeID'][:8]}": dict(node["Resources"]) for node in nodes}


def none_at_all(device: Device) -> str | None:
    """Returns the reason why no live node of the connected cluster has the resources of a single rank on `device`, or None if
    one has."""
    return impossible(bundles(Layout(), device), node_resources())


def bundles_of_ranks(settings: ReplicaSettings) -> tuple[int, ...]:
    """Returns the index of the placement-group bundle of each rank, in world-rank order. A bundle contains one TP group."""
    return tuple(bundle_of(settings.layout, rank) for rank in range(settings.layout.world))


def _try_reserve(settings: ReplicaSettings, wanted: Sequence[Bundle], home: str | None) -> ReservedBundles | None:
    """Reserve the bundles on free resources. Returns None if these do not suffice, or were taken in the meantime."""
    cluster = discover(settings.device, settings.pool)
    free = free_slots(cluster, available(), settings.device)
    ids = [node.id for node in cluster.nodes]
    others = [at for at, node in enumerate(cluster.nodes) if free[at] < node.slots]
    assignment = assign_bundles(settings.layout, settings.spec, cluster, free, others, ids.index(home) if home in ids else None)
    if assignment is None:
        return None
    nodes = tuple(ids[at] for at in assignment.nodes)
    group = placement_group([dict(bundle) for bundle in wanted], bundle_label_selector=[{NODE_ID: node} for node in nodes])
    if not group.wait(_RESERVE_S):
        remove_placement_group(group)
        return None
    _verify(group, nodes)
    _warn_of_slow_links(settings, cluster, assignment)
    return ReservedBundles(group, bundles_of_ranks(settings), nodes)


def _verify(group: PlacementGroup, nodes: Sequence[str]) -> None:
    """Check that the bundles are on the requested nodes. Raises `PlacementError` otherwise."""
    got: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    wrong = [f"bundle {at} on {got.get(at)} instead of {node}" for at, node in enumerate(nodes) if got.get(at) != node]
    if wrong:
        remove_placement_group(group)
        raise PlacementError(f"Ray placed {'; '.join(wrong)}")


def _warn_of_slow_links(settings: ReplicaSettings, cluster: ClusterSpec, assignment: BundleAssignment) -> None:
    """Log the traffic over each slow link that the layout crosses, for a decode step of one token per DP rank."""
    step = StepShape.of(settings.layout.attn_dp, 1, dtype=settings.dtype, dp_size=settings.layout.attn_dp)
    ranks = nodes_of_ranks(settings.layout, assignment)
    for line in crossing_lines(cluster, link_loads(settings.spec, settings.layout, step, cluster, ranks), only_slow=True):
        log.warning("%s", line)


def _demand(settings: ReplicaSettings, wanted: Sequence[Bundle]) -> PlacementGroup:
    """Create a pending placement group that announces the missing resources to Ray and its autoscaler.

    The bundles are requested within one fast domain if Ray knows one that is large enough, and on different nodes if the layout
    has several PP stages.
    """
    largest = max(domain_slots(open_to(ray.nodes(), settings.pool), settings.device).values(), default=0)
    strategy = {NODE_ID: "SPREAD" if settings.layout.pp > 1 else "PACK"}
    if largest >= settings.layout.world:
        strategy[RAY_DOMAIN] = "STRICT_PACK"
    kept = [pool_selector(settings.pool)] * len(wanted) if settings.pool else None
    group: PlacementGroup = placement_group(
        [dict(bundle) for bundle in wanted], topology_strategy=strategy, bundle_label_selector=kept
    )
    return group


def _had_placement(settings: ReplicaSettings) -> bool:
    """Whether a replica of this deployment has had a placement before."""
    return bool(settings.deployment) and bool(_internal_kv_exists(_key(settings), namespace=NAMESPACE.encode()))


def _remember(settings: ReplicaSettings) -> None:
    if settings.deployment:
        _internal_kv_put(_key(settings), b"1", namespace=NAMESPACE.encode())


def _key(settings: ReplicaSettings) -> bytes:
    return f"placed-{settings.deployment}".encode()
