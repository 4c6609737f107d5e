"""Seats for ranks: one placement group per replica, one bundle per tensor-parallel group.

A bundle is never split over nodes, so a tp group sits inside one node by construction; stages are spread over nodes
where there are several.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from placement.bundles import impossible

log = logging.getLogger("shardwright.seats")

_REPORT_EVERY_S = 5.0


class SeatError(RuntimeError):
    """The cluster cannot seat a replica, or did not in time. Says which bundle, which resource, and what there is."""


def take(bundles: Sequence[Mapping[str, float]], spread: bool, timeout_s: float) -> PlacementGroup:
    """Reserve the bundles, which are freed when the calling process ends.

    Impossible is told apart from busy before waiting. Raises `SeatError`.
    """
    reason = impossible(bundles, node_resources())
    if reason is not None:
        raise SeatError(reason)
    group: PlacementGroup = placement_group([dict(bundle) for bundle in bundles], strategy="SPREAD" if spread else "PACK")
    began = time.monotonic()
    while not group.wait(_REPORT_EVERY_S):
        waited = time.monotonic() - began
        if waited > timeout_s:
            state = placement_group_table(group).get("state", "unknown")
            remove_placement_group(group)
            raise SeatError(
                f"no free seats for {list(bundles)} after {waited:.0f} s (placement group is {state}): the cluster is busy"
            )
        log.warning("waiting for free seats for %s: %.0f of %.0f s", list(bundles), waited, timeout_s)
    return group


def node_resources() -> dict[str, dict[str, float]]:
    """Total resources of every live node, by its address and id, as Ray names them."""
    return {
        f"{node['NodeManagerAddress']}/{node['NodeID'][:8]}": dict(node["Resources"]) for node in ray.nodes() if node["Alive"]
    }
