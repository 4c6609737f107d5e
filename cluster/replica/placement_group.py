"""Bundles for ranks: one placement group per replica, one bundle per tensor-parallel group.

A bundle is never split over nodes, so a tp group sits inside one node by construction. Which node each bundle sits on is
decided by `placement.nodes.assignment`, from what is free, and asked for by node id.

    look at the nodes ──→ impossible ──→ refuse, or (nodes may come) wait with the demand known to Ray
          ↑               busy       ──→ wait
          └────────────── assigned   ──→ reserve; somebody was faster: look again
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
"""A replica that had a placement waits so long for the nodes to come back."""
_RESERVE_S = 3.0
"""Bundles that are free are reserved in milliseconds; if not, somebody else has them."""


@dataclass(frozen=True)
class ReservedBundles:
    """A replica's reserved bundles: the bundle of each rank, and the node (Ray's id) of each bundle."""

    group: PlacementGroup
    bundle_of_rank: tuple[int, ...]
    nodes: tuple[str, ...]

    def node_of(self, world_rank: int) -> str:
        """The node a rank must run on."""
        return self.nodes[self.bundle_of_rank[world_rank]]

    def are_whole(self) -> bool:
        """Whether every bundle is still reserved: none of the nodes is gone."""
        return str(placement_group_table(self.group).get("state")) == "CREATED"

    def free(self) -> None:
        """Give them back."""
        remove_placement_group(self.group)


def reserve(settings: ReplicaSettings, home: str | None = None) -> ReservedBundles:
    """Reserve the bundles of one replica, which are freed when the calling process ends.

    Impossible is told apart from busy before waiting: it is refused at once, unless the nodes were there before, or are still
    to start (`ReplicaSettings.nodes_wait_s`). `home`: the node (Ray's id) to begin on where nothing speaks against it. Raises
    `PlacementError`.
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
    """Total resources of every live node that the pool may use, by its address and id, as Ray names them."""
    nodes = [node for node in open_to(ray.nodes(), pool) if node["Alive"]]
    return {f"{node['NodeManagerAddress']}/{node['NodeID'][:8]}": dict(node["Resources"]) for node in nodes}


def none_at_all(device: Device) -> str | None:
    """Why no rank of any layout could ever sit on the live nodes; None where one could."""
    return impossible(bundles(Layout(), device), node_resources())


def bundles_of_ranks(settings: ReplicaSettings) -> tuple[int, ...]:
    """The bundle of each rank, in world-rank order."""
    return tuple(bundle_of(settings.layout, rank) for rank in range(settings.layout.world))


def _try_reserve(settings: ReplicaSettings, wanted: Sequence[Bundle], home: str | None) -> ReservedBundles | None:
    """The bundles on what is free now; None where that is too little, or somebody else was faster."""
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
    """The bundles are where they were asked for. Raises `PlacementError`."""
    got: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    wrong = [f"bundle {at} on {got.get(at)} instead of {node}" for at, node in enumerate(nodes) if got.get(at) != node]
    if wrong:
        remove_placement_group(group)
        raise PlacementError(f"Ray has placed {'; '.join(wrong)}")


def _warn_of_slow_links(settings: ReplicaSettings, cluster: ClusterSpec, assignment: BundleAssignment) -> None:
    """A layout that must cross a slow link says what that costs: one token for each DP rank."""
    step = StepShape.of(settings.layout.attn_dp, 1, dtype=settings.dtype, dp_size=settings.layout.attn_dp)
    ranks = nodes_of_ranks(settings.layout, assignment)
    for line in crossing_lines(cluster, link_loads(settings.spec, settings.layout, step, cluster, ranks), only_slow=True):
        log.warning("%s", line)


def _demand(settings: ReplicaSettings, wanted: Sequence[Bundle]) -> PlacementGroup:
    """Tells Ray, and with it an autoscaler, what is missing: in one fast domain where Ray knows one that is large enough, a
    node for each stage where there are several."""
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
    """Whether a replica of this deployment had a placement once."""
    return bool(settings.deployment) and bool(_internal_kv_exists(_key(settings), namespace=NAMESPACE.encode()))


def _remember(settings: ReplicaSettings) -> None:
    if settings.deployment:
        _internal_kv_put(_key(settings), b"1", namespace=NAMESPACE.encode())


def _key(settings: ReplicaSettings) -> bytes:
    return f"placed-{settings.deployment}".encode()
