"""What the connected cluster has: nodes, slots, memory, domains, as a value the pure packages can judge."""

from __future__ import annotations

from collections.abc import Mapping

import ray

from actors.wire.rank_config import Device
from cluster.nodes import topology
from placement.nodes.hardware import ClusterSpec


def discover(device: Device, pool: str = "") -> ClusterSpec:
    """Live nodes of the connected cluster with their slots for ranks of `device`; only those that a pool may use, where one is
    named. Raises a Ray error when not connected."""
    return topology.cluster_of(topology.open_to(ray.nodes(), pool), device)


def available() -> Mapping[str, Mapping[str, float]]:
    """Resources nobody has now, by node id. They lag behind what happens by a fraction of a second."""
    found: Mapping[str, Mapping[str, float]] = ray._private.state.available_resources_per_node()
    return found


def best_device() -> Device:
    """CUDA where any node of the connected cluster offers GPUs, else the CPU."""
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
