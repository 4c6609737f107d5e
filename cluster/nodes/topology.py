"""Reading a cluster out of what Ray knows of its nodes: resources and labels. Needs no Ray itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actors.wire.rank_config import Device
from actors.wire.roles import Role
from placement.nodes.hardware import ClusterSpec, NodeSpec
from placement.nodes.links import NVLINK, PCIE, Link, NodeLink, fast_domains

NAME_LABEL = "shardwright/name"
"""What a node is to be called; its address, unless given."""

POOL_LABEL = "shardwright/pool"
"""The pool whose replicas a node is kept for, one of `POOLS`; a node without it takes those of any."""
POOLS = tuple(Role)

RAY_DOMAIN = "ray.io/gpu-domain"
DOMAIN_LABELS = (RAY_DOMAIN, "gpu-domain", "nvidia.com/gpu.clique")
RACK_LABELS = ("rack", "topology.kubernetes.io/rack")
ZONE_LABELS = ("ray.io/availability-zone", "zone", "topology.kubernetes.io/zone")
ACCELERATOR_LABEL = "ray.io/accelerator-type"
HEAD_RESOURCE = "node:__internal_head__"


def resource_of(device: Device) -> str:
    """What Ray counts the slots of a device in."""
    return "GPU" if device == "cuda" else "CPU"


def cluster_of(nodes: Sequence[Mapping[str, Any]], device: Device) -> ClusterSpec:
    """The live ones of ``ray.nodes()`` with their slots for ranks of `device`, in the order of their names."""
    alive = [node for node in nodes if node["Alive"]]
    shared = Counter(_name(node) for node in alive)
    specs = (_node(node, device, shared[_name(node)] > 1) for node in alive)
    return ClusterSpec(nodes=tuple(sorted(specs, key=lambda spec: _natural(spec.name))))


def open_to(nodes: Sequence[Mapping[str, Any]], pool: str) -> list[Mapping[str, Any]]:
    """Those of ``ray.nodes()`` that are not kept for another pool than `pool`; all of them where it is empty."""
    return [node for node in nodes if not pool or (node.get("Labels") or {}).get(POOL_LABEL, pool) == pool]


def pool_selector(pool: str) -> dict[str, str]:
    """The same as a label selector of Ray's."""
    return {POOL_LABEL: f"!in({', '.join(other for other in POOLS if other != pool)})"} if pool else {}


def slotless(nodes: Sequence[Mapping[str, Any]], device: Device) -> list[str]:
    """Ids of the live nodes that have no slot, such as a head that does no model work."""
    return [node["NodeID"] for node in nodes if node["Alive"] and node["Resources"].get(resource_of(device), 0) < 1]


def head_of(nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Id of the head node."""
    return next((node["NodeID"] for node in nodes if node["Alive"] and HEAD_RESOURCE in node["Resources"]), None)


def free_slots(cluster: ClusterSpec, available: Mapping[str, Mapping[str, float]], device: Device) -> list[int]:
    """Slots of each node that nobody has now; `available`: free resources by node id. A rank on a GPU needs a CPU as well."""
    wanted = {resource_of(device), "CPU"}
    return [int(min(available.get(node.id, {}).get(resource, 0) for resource in wanted)) for node in cluster.nodes]


def domain_slots(nodes: Sequence[Mapping[str, Any]], device: Device) -> dict[str, int]:
    """Slots of each domain that is named by the label Ray itself knows."""
    found: Counter[str] = Counter()
    for node in nodes:
        name = (node.get("Labels") or {}).get(RAY_DOMAIN)
        if node["Alive"] and name:
            found[name] += int(node["Resources"].get(resource_of(device), 0))
    return dict(found)


def with_links(cluster: ClusterSpec, links: Sequence[NodeLink], inside: Mapping[str, Link]) -> ClusterSpec:
    """The cluster with what was measured: links between nodes and, by node name, inside them. Nodes of a cluster that names no
    domain get those that the links show."""
    found = {} if any(node.domain for node in cluster.nodes) else fast_domains([node.name for node in cluster.nodes], links)
    nodes = tuple(
        node.model_copy(update={"domain": node.domain or found.get(node.name), "inside": inside.get(node.name, node.inside)})
        for node in cluster.nodes
    )
    return ClusterSpec(nodes=nodes, links=tuple(links))


def device_link(topology: str) -> Link | None:
    """The slowest link between two GPUs of a machine, of what ``nvidia-smi topo -m`` prints; None where it has fewer than two.

    ``NV12`` is NVLink; everything else goes over PCIe or further.
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
    """Sorts ``10.0.0.10`` behind ``10.0.0.9``."""
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
