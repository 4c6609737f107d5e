"""Discovery of the connected Ray cluster: its nodes, slots, memory and domains as a `ClusterSpec`."""

from __future__ import annotations

from collections.abc import Mapping

import ray

from actors.wire.rank_config import Device
from cluster.nodes import topology
from placement.nodes.hardware import ClusterSpec


def discover(device: Device, pool: str = "") -> ClusterSpec:
    """Returns the live nodes of the connected Ray cluster with their slots for ranks of `device`.

    `pool` (``prefill``, ``decode`` or ``mixed``) leaves out the nodes that are reserved for another pool; an empty text leaves
    out none. Raises a Ray error if not connected.
    """
    return topology.cluster_of(topology.open_to(ray.nodes(), pool), device)


def available() -> Mapping[str, Mapping[str, float]]:
    """Returns the free amount of each Ray resource (``CPU``, ``GPU``; ``memory`` in bytes) of every live node, by node id.

    The amounts lag behind the actual state by a fraction of a second. Raises a Ray error if not connected.
    """
    found: Mapping[str, Mapping[str, float]] = ray._private.state.available_resources_per_node()
    return found


def best_device() -> Device:
    """Returns ``cuda`` if any node of the connected Ray cluster has GPUs, else ``cpu``. Raises a Ray error if not connected."""
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
