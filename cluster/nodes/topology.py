"""Translation of Ray's node list, with its resources and labels, into a `ClusterSpec`. This module does not import Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actors.wire.rank_config import Device
from actors.wire.roles import Role
from placement.nodes.hardware import ClusterSpec, NodeSpec
from placement.nodes.links import NVLINK, PCIE, Link, NodeLink, fast_domains

NAME_LABEL = "shardwright/name"
"""The label with the name of a node. Without it, a node is named by its address."""

POOL_LABEL = "shardwright/pool"
"""The label with the pool that a node is reserved for, one of `POOLS`. A node without it takes the replicas of any pool."""
POOLS = tuple(Role)

RAY_DOMAIN = "ray.io/gpu-domain"
DOMAIN_LABELS = (RAY_DOMAIN, "gpu-domain", "nvidia.com/gpu.clique")
RACK_LABELS = ("rack", "topology.kubernetes.io/rack")
ZONE_LABELS = ("ray.io/availability-zone", "zone", "topology.kubernetes.io/zone")
ACCELERATOR_LABEL = "ray.io/accelerator-type"
HEAD_RESOURCE = "node:__internal_head__"


def resource_of(device: Device) -> str:
    """Returns the Ray resource that counts the slots of a device."""
    return "GPU" if device == "cuda" else "CPU"


def cluster_of(nodes: Sequence[Mapping[str, Any]], device: Device) -> ClusterSpec:
    """Returns the live nodes of ``ray.nodes()`` with their slots for ranks of `device`, in the order of their names."""
    alive = [node for node in nodes if node["Alive"]]
    shared = Counter(_name(node) for node in alive)
    specs = (_node(node, device, shared[_name(node)] > 1) for node in alive)
    return ClusterSpec(nodes=tuple(sorted(specs, key=lambda spec: _natural(spec.name))))


def open_to(nodes: Sequence[Mapping[str, Any]], pool: str) -> list[Mapping[str, Any]]:
    """Returns the nodes of ``ray.nodes()`` that are not reserved for a pool other than `pool`; all of them if it is empty."""
    return [node for node in nodes if not pool or (node.get("Labels") or {}).get(POOL_LABEL, pool) == pool]


def pool_selector(pool: str) -> dict[str, str]:
    """Returns the condition of `open_to` as a Ray label selector."""
    return {POOL_LABEL: f"!in({', '.join(other for other in POOLS if other != pool)})"} if pool else {}


def slotless(nodes: Sequence[Mapping[str, Any]], device: Device) -> list[str]:
    """Returns the ids of the live nodes that have no slot, such as a head that runs no ranks."""
    return [node["NodeID"] for node in nodes if node["Alive"] and node["Resources"].get(resource_of(device), 0) < 1]


def head_of(nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the id of the live head node, or None."""
    return next((node["NodeID"] for node in nodes if node["Alive"] and HEAD_RESOURCE in node["Resources"]), None)


def free_slots(cluster: ClusterSpec, available: Mapping[str, Mapping[str, float]], device: Device) -> list[int]:
    """Returns the number of free slots of each node. `available` are the free resources by node id. A GPU rank needs a CPU
    too."""
    wanted = {resource_of(device), "CPU"}
    return [int(min(available.get(node.id, {}).get(resource, 0) for resource in wanted)) for node in cluster.nodes]


def domain_slots(nodes: Sequence[Mapping[str, Any]], device: Device) -> dict[str, int]:
    """Returns the slots of each domain that Ray's own label (`RAY_DOMAIN`) names."""
    found: Counter[str] = Counter()
    for node in nodes:
        name = (node.get("Labels") or {}).get(RAY_DOMAIN)
        if node["Alive"] and name:
            found[name] += int(node["Resources"].get(resource_of(device), 0))
    return dict(found)


def with_links(cluster: ClusterSpec, links: Sequence[NodeLink], inside: Mapping[str, Link]) -> ClusterSpec:
    """Returns the cluster with measured links: `links` between nodes and `inside` them, by node name.

    If no node of the cluster names a domain, the fast domains that follow from the links are set.
    """
    found = {} if any(node.domain for node in cluster.nodes) else fast_domains([node.name for node in cluster.nodes], links)
    nodes = tuple(
        node.model_copy(update={"domain": node.domain or found.get(node.name), "inside": inside.get(node.name, node.inside)})
        for node in cluster.nodes
    )
    return ClusterSpec(nodes=nodes, links=tuple(links))


def device_link(topology: str) -> Link | None:
    """Returns the slowest link between two GPUs of a machine, from the output of ``nvidia-smi topo -m``; None if it has fewer
    than two GPUs.

    ``NV12`` and the like are NVLink; every other entry is taken as PCIe.
    """
    rows = [line.split() for line in topology.splitlines() if line.startswith("GPU")]
    cells = {cell for row in rows for cell in row[1 : 1 + len(rows)] if cell != "X"}
    if len(rows) < 2 or not cells:
        return None
    return NVLINK if all(cell.startswith("NV") for cell in cells) else PCIE


def _node(node: Mapping[str, Any], device: Device, is_shared: bool) -> NodeSpec:
    resources, labels = node["Resources"], node.get("Labels") or {}
    name = _name(node)
    return NodeSpec(
        name=f"{name}/{node['NodeID'][:8]}" if is_shared else name,
        slots=int(resources.get(resource_of(device), 0)),
        memory_bytes=int(resources.get("memory", 0)) or None if device == "cpu" else None,
        kind=device,
        id=node["NodeID"],
        accelerator=labels.get(ACCELERATOR_LABEL),
        domain=_first(labels, DOMAIN_LABELS),
        rack=_first(labels, RACK_LABELS),
        zone=_first(labels, ZONE_LABELS),
        pool=labels.get(POOL_LABEL),
    )


def _name(node: Mapping[str, Any]) -> str:
    return str((node.get("Labels") or {}).get(NAME_LABEL) or node["NodeManagerAddress"])


def _first(labels: Mapping[str, str], keys: Sequence[str]) -> str | None:
    return next((labels[key] for key in keys if labels.get(key)), None)


def _natural(text: str) -> list[tuple[int, str]]:
    """Returns a sort key for natural order, in which ``10.0.0.10`` follows ``10.0.0.9``."""
    return [(int(part) if part.isdigit() else -1, part) for part in _runs(text)]


def _runs(text: str) -> Iterator[str]:
    run = ""
    for char in text:
        if run and char.isdigit() != run[-1].isdigit():
            yield run
            run = ""
        run += char
    if run:
        yield run
