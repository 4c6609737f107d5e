"""Where the ranks of a replica really are, checked before they look for each other: in their bundles, and within reach."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from actors.rank.addresses import INTERFACE_VARIABLE
from actors.wire.rank_config import Place
from cluster.replica.placement_group import ReservedBundles


class LaunchError(RuntimeError):
    """Ranks that did not come up: says which rank, what it was doing, and why it failed."""


def check_placement(places: Sequence[Place], reserved: ReservedBundles) -> None:
    """Every rank runs on the node of its bundle. Raises `LaunchError`."""
    for place in places:
        node = reserved.node_of(place.world_rank)
        if place.node_id != node:
            raise LaunchError(f"rank {place.world_rank} runs on node {place.node_id}, but its bundle is on {node}")


def check_reachable(places: Sequence[Place]) -> None:
    """No rank is at a loopback address, unless all are on one machine, whose nodes may well use it. Raises `LaunchError`."""
    nodes, machines = {place.node_id for place in places}, {place.machine for place in places}
    for place in places:
        if len(machines) > 1 and ipaddress.ip_address(place.host).is_loopback:
            raise LaunchError(
                f"rank {place.world_rank} on {place.name} reports the loopback address {place.host}{_over(place)} while the "
                f"layout spans {len(nodes)} nodes: start Ray on that node with --node-ip-address=ADDRESS, or with "
                f"{INTERFACE_VARIABLE} set to an interface that the other nodes reach"
            )


def described(places: Sequence[Place]) -> str:
    """Machine, address and interface of each rank, for a person who finds out why they did not meet."""
    return ", ".join(f"{place.world_rank} on {place.name} at {place.host}{_over(place)}" for place in places)


def _over(place: Place) -> str:
    return f" (interface {place.interface})" if place.interface else ""
