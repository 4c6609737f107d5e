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
    """Returns the name of the Ray resource that counts the slots for ranks of a device: ``GPU`` for ``cuda``, else ``CPU``."""
    return "GPU" if device == "cuda" else "CPU"


def cluster_of(nodes: Sequence[Mapping[str, Any]], device: Device) -> ClusterSpec:
    """Returns the live ones of `nodes` (entries of ``ray.nodes()``) with their slots for ranks of `device`, in the natural
    order of their names.

    A node is named by its label `NAME_LABEL`, or else by its address; nodes that share a name get their id as a suffix. Slots
    are counted in total, not those free now.
    """
    alive = [node for node in nodes if node["Alive"]]
    shared = Counter(_name(node) for node in alive)
    specs = (_node(node, device, shared[_name(node)] > 1) for node in alive)
    return ClusterSpec(nodes=tuple(sorted(specs, key=lambda spec: _natural(spec.name))))


def open_to(nodes: Sequence[Mapping[str, Any]], pool: str) -> list[Mapping[str, Any]]:
    """Returns those of `nodes` (entries of ``ray.nodes()``) that replicas of `pool` may use: all except those that are reserved
    for another pool by the label `POOL_LABEL`; all of them if `pool` is empty."""
    return [node for node in nodes if not pool or (node.get("Labels") or {}).get(POOL_LABEL, pool) == pool]


def pool_selector(pool: str) -> dict[str, str]:
    """Returns the Ray label selector for the nodes that replicas of `pool` may use (the same as `open_to`); empty, and so
    without effect, if `pool` is empty."""
    return {POOL_LABEL: f"!in({', '.join(other for other in POOLS if other != pool)})"} if pool else {}


def slotless(nodes: Sequence[Mapping[str, Any]], device: Device) -> list[str]:
    """Returns the Ray ids of the live ones of `nodes` (entries of ``ray.nodes()``) that have no slot for a rank of `device`,
    such as a head that runs no ranks."""
    return [node["NodeID"] for node in nodes if node["Alive"] and node["Resources"].get(resource_of(device), 0) < 1]


def head_of(nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the Ray id of the head node if it is among the live ones of `nodes` (entries of ``ray.nodes()``), else None."""
    return next((node["NodeID"] for node in nodes if node["Alive"] and HEAD_RESOURCE in node["Resources"]), None)


def free_slots(cluster: ClusterSpec, available: Mapping[str, Mapping[str, float]], device: Device) -> list[int]:
    """Returns the number of free slots for ranks of `device` on each node of `cluster`, in the order of its nodes.

    `available` contains the free resources by Ray node id and resource name, as from `cluster.nodes.discover.available`. A GPU
    rank needs a CPU too; a node that is not in `available` has no free slot.
    """
    wanted = {resource_of(device), "CPU"}
    return [int(min(available.get(node.id, {}).get(resource, 0) for resource in wanted)) for node in cluster.nodes]


def domain_slots(nodes: Sequence[Mapping[str, Any]], device: Device) -> dict[str, int]:
    """Returns the total number of slots for ranks of `device` in each fast domain, by the domain's name, from the live ones of
    `nodes` (entries of ``ray.nodes()``). Only domains that Ray's own label (`RAY_DOMAIN`) names are counted."""
    found: Counter[str] = Counter()
    for node in nodes:
        name = (node.get("Labels") or {}).get(RAY_DOMAIN)
        if node["Alive"] and name:
            found[name] += int(node["Resources"].get(resource_of(device), 0))
    return dict(found)


def with_links(cluster: ClusterSpec, links: Sequence[NodeLink], inside: Mapping[str, Link]) -> ClusterSpec:
    """Returns a copy of `cluster` with measured links: `links` between its nodes, and `inside` the link between the devices of
    a node, by node name (nodes that are not in `inside` keep theirs).

    If no node of the cluster names a domain, the fast domains that follow from the links are set.
    """
    found = {} if any(node.domain for node in cluster.nodes) else fast_domains([node.name for node in cluster.nodes], links)
    nodes = tuple(
        node.model_copy(update={"domain": node.domain or found.get(node.name), "inside": inside.get(node.name, node.inside)})
        for node in cluster.nodes
    )
    return ClusterSpec(nodes=nodes, links=tuple(links))


def device_link(topology: str) -> Link | None:
    """Returns the slowest link between two GPUs of a machine, from `topology`, the output of ``nvidia-smi topo -m``; None if it
    lists fewer than two GPUs.

    Returns the constant `NVLINK` if all entries are ``NV12`` and the like, else `PCIE`.
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
