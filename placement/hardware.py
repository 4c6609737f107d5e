"""The machines a layout is placed on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

DeviceKind = Literal["cpu", "cuda"]


class NodeSpec(BaseModel):
    """One machine. `slots` is the number of ranks it can run: its GPUs, or on a CPU node the CPUs given to ranks.

    `memory_bytes` is the memory of all its slots together (GPU memory, or RAM); None where it is not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    slots: Annotated[int, Field(ge=0)]
    memory_bytes: Annotated[int, Field(ge=0)] | None = None
    kind: DeviceKind = "cpu"


class ClusterSpec(BaseModel):
    """The nodes a deployment may use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: tuple[NodeSpec, ...]

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
