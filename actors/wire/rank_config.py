"""The configuration of one rank and the status values that it returns: plain values, sent between replica and rank."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from actors.wire.tier_config import TierConfig
from placement.layout.layout import Layout
from placement.model.spec import DType, ModelSpec

Device = Literal["cpu", "cuda"]


class RankConfig(BaseModel):
    """Configuration of one rank of one replica.

    `handoff_ranges` and `handoff_range_bytes` are tuned values that tests and benchmarks vary; they are not options of
    ``serve``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    world_rank: int
    layout: Layout
    spec: ModelSpec
    model_path: str
    device: Device
    dtype: DType
    block_size: int
    in_pool: bool = False
    """Whether the rank belongs to a prefill or decode pool, and so sends KV to ranks of other replicas or receives it."""
    handoff_ranges: int = Field(default=4, ge=1)
    """Number of layer ranges that a hand-off sends in turn while a step runs; 1 sends all layers after the last one."""
    handoff_range_bytes: int = Field(default=1 << 20, ge=1)
    """Minimum bytes of a prompt in a layer range; a smaller one is merged into the next, since every write costs time."""
    tiers: TierConfig | None = None
    """KV tiers behind the pages of this rank; None disables KV offload."""
    threads_per_rank: int | None = None
    """CPU threads of this rank; None divides the cores of the machine evenly between its ranks."""

    @property
    def needs_model_digest(self) -> bool:
        """Whether the rank exchanges KV with ranks of other replicas, or keeps it in tiers, and so must know that they compute
        the same model."""
        return self.in_pool or self.tiers is not None


class Rendezvous(BaseModel):
    """The addresses with which the ranks of one replica connect to each other.

    `token` is new at every start and restart, so that ranks of different generations never connect.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str
    nodes: tuple[str, ...]
    """Node of each world rank. Ranks of one node communicate over shared memory, others over sockets."""
    hosts: tuple[str, ...]
    """Address of each world rank, reachable from every other."""
    store_port: int
    """Port of the key-value store that world rank 0 serves at its address."""
    timeout_s: float = 60.0


class RankLocation(BaseModel):
    """The place where a rank runs: its node, address and process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    world_rank: int
    node_id: str
    host: str
    """Address at which other ranks reach it."""
    pid: int
    machine: str = ""
    """Identifier of the running system and its network namespace: equal for nodes that share both."""
    name: str = ""
    """Host name of the machine."""
    interface: str = ""
    """Network interface that has the address; empty if unknown."""
    memory_bytes: int | None = None
    """Host memory that the process may use, in bytes: that of its machine, or less by a cgroup; None if unknown."""


class Loaded(BaseModel):
    """The outcome of loading a rank's weights. `free_bytes` is the device memory left for KV pages (CUDA only).

    `chunk_digests` are those of the rank's share of the checkpoint (`placement.model.digest`), empty if they are not needed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight_bytes: int
    seconds: float
    free_bytes: int | None = None
    chunk_digests: bytes = b""


class RankStatus(BaseModel):
    """The progress of a rank, for progress bars and `shardwright status`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state: Literal["created", "connecting", "loading", "loaded", "running", "failed"]
    loaded_bytes: int = 0
    total_bytes: int = 0
    steps: int = 0


class RankReport(BaseModel):
    """A rank's place in the cluster and in its layout, and its progress."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    location: RankLocation
    device: str
    """``cpu``, or ``cuda`` followed by the GPU ids in the node's own numbering."""
    coords: dict[str, int]
    status: RankStatus
