"""The machines a layout is placed on."""

from __future__ import annotations

from pathlib import Path
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
