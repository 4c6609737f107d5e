"""What the connected cluster has: nodes, seats, memory, as a value the pure packages can judge."""

from __future__ import annotations

import ray

from actors.config import Device
from placement.hardware import ClusterSpec, NodeSpec


def discover(device: Device) -> ClusterSpec:
    """Live nodes of the connected cluster with their slots for ranks of `device`. Raises a Ray error when not connected."""
    resource = "GPU" if device == "cuda" else "CPU"
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return ClusterSpec(
        nodes=tuple(
            NodeSpec(
                name=node["NodeManagerAddress"],
                slots=int(node["Resources"].get(resource, 0)),
                memory_bytes=int(node["Resources"].get("memory", 0)) or None if device == "cpu" else None,
                kind=device,
            )
            for node in nodes
        )
    )


def best_device() -> Device:
    """CUDA where any node of the connected cluster offers GPUs, else the CPU."""
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
