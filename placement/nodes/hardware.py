"""The machines a layout is placed on: nodes, the domains they share, and the links between them.

How far two nodes are apart is read from what they have in common; what neither of them says counts as shared::

    distance 0   the same node
             1   the same fast domain (NVLink across machines, or simply: nothing says they are apart)
             2   another fast domain, the same rack
             3   another rack, the same zone          <- from 2 on, a link is slow
             4   another zone
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from placement.nodes.links import Link, NodeLink, assumed

DeviceKind = Literal["cpu", "cuda"]

SLOW = 2
"""Distance from which a link is slow."""


class NodeSpec(BaseModel):
    """One machine. `slots` is the number of ranks it can run: its GPUs, or on a CPU node the CPUs given to ranks.

    `memory_bytes` is the memory of all its slots together (GPU memory, or RAM); None where it is not known. `domain` names
    the fastest network it shares with other nodes, `rack` and `zone` what that lies in; None where nobody says. `inside` is the
    link between two of its own devices.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    slots: Annotated[int, Field(ge=0)]
    memory_bytes: Annotated[int, Field(ge=0)] | None = None
    kind: DeviceKind = "cpu"
    id: str = ""
    """What the scheduler calls it; empty where it has not been discovered."""
    accelerator: str | None = None
    domain: str | None = None
    rack: str | None = None
    zone: str | None = None
    pool: str | None = None
    """The pool of replicas it is kept for; None: any."""
    inside: Link | None = None

    @property
    def path(self) -> tuple[str | None, ...]:
        """What it lies in, outermost first; its domain is that of its rack, its rack that of its zone."""
        return self.zone, self.rack, self.domain


class ClusterSpec(BaseModel):
    """The nodes a deployment may use. `links` are those that were measured; `link` knows all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: tuple[NodeSpec, ...]
    links: tuple[NodeLink, ...] = ()

    @property
    def slots(self) -> int:
        """Ranks all nodes together can run."""
        return sum(node.slots for node in self.nodes)

    @property
    def largest_node(self) -> NodeSpec | None:
        """The node with the most slots (the first of equals); None for an empty cluster."""
        return max(self.nodes, key=lambda node: node.slots, default=None)

    def tp_groups(self, tp: int) -> int:
        """How many groups of `tp` ranks fit when no group spans nodes."""
        return sum(node.slots // tp for node in self.nodes)

    def distance(self, one: int, other: int) -> int:
        """How far two nodes (by their index) are apart: 0 to 4, see the module."""
        if one == other:
            return 0
        ways = zip(self.nodes[one].path, self.nodes[other].path, strict=True)
        return next((4 - level for level, (a, b) in enumerate(ways) if a != b), 1)

    def is_slow(self, one: int, other: int) -> bool:
        """Whether the link between two nodes is slow: they share no fast domain."""
        return self.distance(one, other) >= SLOW

    def link(self, one: int, other: int) -> Link:
        """The link from one node to another (from a node to itself: between its devices): measured, or what is assumed."""
        a, b = self.nodes[one], self.nodes[other]
        if one == other and a.inside is not None:
            return a.inside
        found = next((each.link for each in self.links if {each.a, each.b} == {a.name, b.name}), None)
        return found or assumed(self.distance(one, other), a.kind, a.domain is not None and a.domain == b.domain)


_CPU_FACTS = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = {"avx512bw", "bf16", "amx_bf16"}
"""With AVX-512 alone, kernels widen bfloat16 on the way, at no great loss."""


def cpu_has_bfloat16(facts: Path = _CPU_FACTS) -> bool:
    """Whether this machine's CPU multiplies bfloat16 matrices about as fast as fp32 ones or faster; True where the system
    does not say. One with AVX2 only is three to seven times slower in bfloat16."""
    try:
        lines = facts.read_text().splitlines()
    except OSError:
        return True
    flags = next((line.split(":", 1)[1] for line in lines if line.lower().startswith(("flags", "features"))), None)
    return flags is None or not _BFLOAT16_FLAGS.isdisjoint(flags.split())
