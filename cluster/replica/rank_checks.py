"""Checks of the ranks' actual locations before they connect: each rank must be in its bundle and reachable by the others."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from actors.rank.addresses import INTERFACE_VARIABLE
from actors.wire.rank_config import RankLocation
from cluster.replica.placement_group import ReservedBundles
from placement.model.errors import ReportedError


class LaunchError(ReportedError, RuntimeError):
    """Raised when the ranks of a replica cannot be launched. The message names the rank, what it was doing, and the reason."""

    code = "launch_failed"


def check_placement(locations: Sequence[RankLocation], reserved: ReservedBundles) -> None:
    """Raises `LaunchError` unless every rank, as located by `locations`, runs on the node of its bundle."""
    for location in locations:
        node = reserved.node_of(location.world_rank)
        if location.node_id != node:
            raise LaunchError(f"rank {location.world_rank} runs on node {location.node_id}, but its bundle is on {node}")


def check_reachable(locations: Sequence[RankLocation]) -> None:
    """Raises `LaunchError` if a rank reports a loopback address, unless all ranks are on one machine, where that works."""
    nodes, machines = {location.node_id for location in locations}, {location.machine for location in locations}
    for location in locations:
        if len(machines) > 1 and ipaddress.ip_address(location.host).is_loopback:
            raise LaunchError(
                f"rank {location.world_rank} on {location.name} reports the loopback address {location.host}{_over(location)} "
                f"while the "
                f"layout spans {len(nodes)} nodes: start Ray on that node with --node-ip-address=ADDRESS, or with "
                f"{INTERFACE_VARIABLE} set to an interface that the other nodes reach"
            )


def check_memory(locations: Sequence[RankLocation], needed_bytes: Sequence[int]) -> None:
    """Raises `LaunchError` if the ranks of one machine need more memory than their processes may use there, where a cgroup may
    limit it below what Ray has reported for the node.

    `needed_bytes` has the host memory that each rank needs, by world rank. Ranks of unknown memory are not checked.
    """
    by_machine: dict[str, list[RankLocation]] = {}
    for location in locations:
        by_machine.setdefault(location.machine or location.node_id, []).append(location)
    for here in by_machine.values():
        limits = [location.memory_bytes for location in here if location.memory_bytes is not None]
        needed = sum(needed_bytes[location.world_rank] for location in here)
        if limits and needed > min(limits):
            ranks = ", ".join(str(location.world_rank) for location in here)
            raise LaunchError(
                f"rank {ranks} on {here[0].name or here[0].host} may use {min(limits):,} bytes of memory there (the machine's, "
                f"or the limit of a cgroup), but would need {needed:,} for weights, KV cache and processes: give the node more "
                "memory, or take a smaller kv_bytes or host_cache, or fewer ranks a node"
            )


def described(locations: Sequence[RankLocation]) -> str:
    """Returns the machine, address and network interface of each rank as text, for an error message about ranks that did not
    connect."""
    return ", ".join(f"{location.world_rank} on {location.name} at {location.host}{_over(location)}" for location in locations)


def _over(location: RankLocation) -> str:
    return f" (interface {location.interface})" if location.interface else ""
