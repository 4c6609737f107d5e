"""Links between nodes: how fast, how late, and whether anybody has measured it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Link(BaseModel):
    """One direction of a link. `assumed` is what links of this kind usually do, nothing that was seen here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes_per_s: Annotated[float, Field(gt=0)]
    latency_s: Annotated[float, Field(ge=0)]
    source: Literal["measured", "assumed"] = "assumed"

    def seconds(self, num_bytes: float, calls: float = 1) -> float:
        """Time for so many bytes in so many messages, one after the other."""
        return calls * self.latency_s + num_bytes / self.bytes_per_s


class NodeLink(BaseModel):
    """The link between two nodes, by their names; the same both ways."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    a: str
    b: str
    link: Link


NVLINK = Link(bytes_per_s=300e9, latency_s=5e-6)
"""One direction of an A100's NVLink; newer ones are faster."""
PCIE = Link(bytes_per_s=25e9, latency_s=10e-6)
"""What is left of 16 lanes of PCIe 4."""
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
"""10 Gbit/s Ethernet; between zones 5 Gbit/s and a millisecond."""


def assumed(distance: int, kind: Literal["cpu", "cuda"], same_domain: bool) -> Link:
    """The usual link at a distance (see `placement.nodes.hardware`). `same_domain`: a fast domain is named, and both are in
    it."""
    if kind == "cpu":
        return _MEMORY if distance == 0 else _BETWEEN[distance]
    if distance == 0 or same_domain:
        return NVLINK
    return (_BETWEEN_GPU_NODES | {far: _BETWEEN[far] for far in (3, 4)})[distance]


def fast_domains(names: Sequence[str], links: Sequence[NodeLink]) -> dict[str, str]:
    """Names of domains by node, from measured links: nodes belong together that a link of at least a quarter of the fastest
    one's speed joins, directly or through others. Empty where nothing is slower than that, or nothing was measured."""
    fastest = max((each.link.bytes_per_s for each in links), default=0.0)
    home = {name: name for name in names}
    for each in links:
        if each.link.bytes_per_s >= fastest / 4:
            old, new = home[each.b], home[each.a]
            home = {name: new if at == old else at for name, at in home.items()}
    return home if len(set(home.values())) > 1 and links else {}
