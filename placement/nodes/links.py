"""Network links between nodes: bandwidth, latency, and whether these were measured or assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Link(BaseModel):
    """One direction of a link. `source` is ``measured``, or ``assumed`` for typical values of this kind of link."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes_per_s: Annotated[float, Field(gt=0)]
    latency_s: Annotated[float, Field(ge=0)]
    source: Literal["measured", "assumed"] = "assumed"

    def seconds(self, num_bytes: float, calls: float = 1) -> float:
        """Returns the time in seconds to send `num_bytes` bytes in `calls` consecutive messages."""
        return calls * self.latency_s + num_bytes / self.bytes_per_s


class NodeLink(BaseModel):
    """The link between two nodes, given by name; equal in both directions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    a: str
    b: str
    link: Link


NVLINK = Link(bytes_per_s=300e9, latency_s=5e-6)
"""One direction of an A100's NVLink; newer generations are faster."""
PCIE = Link(bytes_per_s=25e9, latency_s=10e-6)
"""Effective rate of 16 lanes of PCIe 4."""
_MEMORY = Link(bytes_per_s=10e9, latency_s=20e-6)
"""Shared memory between processes."""
_BETWEEN_GPU_NODES = {1: Link(bytes_per_s=25e9, latency_s=10e-6), 2: Link(bytes_per_s=25e9, latency_s=10e-6)}
"""200 Gbit/s InfiniBand."""
_BETWEEN = {
    1: Link(bytes_per_s=1.25e9, latency_s=100e-6),
    2: Link(bytes_per_s=1.25e9, latency_s=100e-6),
    3: Link(bytes_per_s=1.25e9, latency_s=200e-6),
    4: Link(bytes_per_s=0.6e9, latency_s=1e-3),
}
"""Links by distance: 10 Gbit/s Ethernet; between zones about 5 Gbit/s with a latency of 1 ms."""


def assumed(distance: int, kind: Literal["cpu", "cuda"], same_domain: bool) -> Link:
    """Returns the typical link between two nodes (or the devices of one) at a distance of 0 to 4, as `ClusterSpec.distance`
    counts it.

    `kind` is the device kind of the nodes; `same_domain` is whether both nodes are labelled with the same fast domain. Raises
    `KeyError` for a larger distance.
    """
    if kind == "cpu":
        return _MEMORY if distance == 0 else _BETWEEN[distance]
    if distance == 0 or same_domain:
        return NVLINK
    return (_BETWEEN_GPU_NODES | {far: _BETWEEN[far] for far in (3, 4)})[distance]


def fast_domains(names: Sequence[str], links: Sequence[NodeLink]) -> dict[str, str]:
    """Infers fast domains from measured links; returns the domain name of each node, which is the name of one of its nodes.

    `names` are all nodes. Nodes share a domain if links of at least a quarter of the fastest link's speed join them, directly
    or through other nodes. The result is empty if all nodes are in one domain, or if nothing was measured. Raises `KeyError` if
    a fast link names an unknown node.
    """
    fastest = max((each.link.bytes_per_s for each in links), default=0.0)
    home = {name: name for name in names}
    for each in links:
        if each.link.bytes_per_s >= fastest / 4:
            old, new = home[each.b], home[each.a]
            home = {name: new if at == old else at for name, at in home.items()}
    return home if len(set(home.values())) > 1 and links else {}
