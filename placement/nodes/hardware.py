"""Cluster topology: nodes, their fast domains, racks and zones, and the links between them.

The distance between two nodes follows from the topology labels that they share. A level at which both labels are unknown
counts as shared::

    distance 0   the same node
             1   the same fast domain (NVLink across machines, or no known difference)
             2   another fast domain, the same rack
             3   another rack, the same zone          <- links at distance 2 and above are slow
             4   another zone
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from placement.nodes.links import Link, NodeLink, assumed

DeviceKind = Literal["cpu", "cuda"]

SLOW = 2
"""Smallest distance at which a link counts as slow."""


class NodeSpec(BaseModel):
    """One machine. `slots` is the number of ranks it can run: its GPUs, or on a CPU node the CPUs reserved for ranks.

    `memory_bytes` is the total memory of all its slots (GPU memory, or RAM); None if unknown. `domain` names the fastest
    network it shares with other nodes; `rack` and `zone` contain the domain; None if unknown. `inside` is the link between two
    of its own devices.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    slots: Annotated[int, Field(ge=0)]
    memory_bytes: Annotated[int, Field(ge=0)] | None = None
    kind: DeviceKind = "cpu"
    id: str = ""
    """Node ID in the scheduler (Ray); empty if the node was not discovered from a running cluster."""
    accelerator: str | None = None
    domain: str | None = None
    rack: str | None = None
    zone: str | None = None
    pool: str | None = None
    """Name of the replica pool that the node is reserved for; None: any pool."""
    inside: Link | None = None

    @property
    def path(self) -> tuple[str | None, ...]:
        """Topology labels of the node, outermost first: zone, rack, domain; None for an unknown one."""
        return self.zone, self.rack, self.domain


class ClusterSpec(BaseModel):
    """The nodes that a deployment may use. `links` holds measured links only; `link` also returns assumed ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: tuple[NodeSpec, ...]
    links: tuple[NodeLink, ...] = ()

    @property
    def slots(self) -> int:
        """Total number of ranks that the nodes can run."""
        return sum(node.slots for node in self.nodes)

    @property
    def largest_node(self) -> NodeSpec | None:
        """The node with the most slots (the first of equals); None for an empty cluster."""
        return max(self.nodes, key=lambda node: node.slots, default=None)

    def tp_groups(self, tp: int) -> int:
        """Returns how many groups of `tp` ranks fit into the slots of all nodes if no group spans nodes."""
        return sum(node.slots // tp for node in self.nodes)

    def distance(self, one: int, other: int) -> int:
        """Returns the distance between two nodes, given by index: 0 for the same node, 1 in the same fast domain, 2 in the same
        rack, 3 in the same zone, 4 in different zones. Labels unknown on both nodes count as equal; a known and an unknown one
        differ."""
        if one == other:
            return 0
        ways = zip(self.nodes[one].path, self.nodes[other].path, strict=True)
        return next((4 - level for level, (a, b) in enumerate(ways) if a != b), 1)

    def is_slow(self, one: int, other: int) -> bool:
        """Whether the link between two nodes, given by index, is slow: the nodes share no fast domain."""
        return self.distance(one, other) >= SLOW

    def link(self, one: int, other: int) -> Link:
        """Returns the measured link between two nodes, given by index, or else the assumed one; for a node and itself, that
        between its devices."""
        a, b = self.nodes[one], self.nodes[other]
        if one == other and a.inside is not None:
            return a.inside
        found = next((each.link for each in self.links if {each.a, each.b} == {a.name, b.name}), None)
        return found or assumed(self.distance(one, other), a.kind, a.domain is not None and a.domain == b.domain)


_CPU_FACTS = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = {"avx512bw", "bf16", "amx_bf16"}
"""CPU flags that indicate fast bfloat16. AVX-512 without bf16 is included: kernels widen bfloat16 on load at little cost."""


def cpu_has_bfloat16(facts: Path = _CPU_FACTS) -> bool:
    """Whether this machine's CPU multiplies bfloat16 matrices at least about as fast as fp32 ones; True if unknown.

    `facts` is the file with the CPU's flags. A CPU with AVX2 only is three to seven times slower in bfloat16.
    """
    try:
        lines = facts.read_text().splitlines()
    except OSError:
        return True
    flags = next((line.split(":", 1)[1] for line in lines if line.lower().startswith(("flags", "features"))), None)
    return flags is None or not _BFLOAT16_FLAGS.isdisjoint(flags.split())
