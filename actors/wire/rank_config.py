"""What one rank must know before it starts: plain values, sent to the rank once."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from actors.wire.tier_config import TierConfig
from placement.layout.layout import Layout
from placement.model.spec import DType, ModelSpec

Device = Literal["cpu", "cuda"]


class RankConfig(BaseModel):
    """One rank of one replica. `handoff_ranges` and `handoff_range_bytes` are tuned values, no options of ``serve``: tests and
    benchmarks vary them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    world_rank: int
    layout: Layout
    spec: ModelSpec
    model_path: str
    device: Device
    dtype: DType
    block_size: int
    in_pool: bool = False
    """Whether it hands off KV to ranks of other replicas or takes it from them."""
    handoff_ranges: int = Field(default=4, ge=1)
    """Ranges of its layers that a hand-off sends one after the other while a step runs; 1: all when its last layer has run."""
    handoff_range_bytes: int = Field(default=1 << 20, ge=1)
    """A range with less than this of a prompt goes with the next one: every write has a price on the rank."""
    tiers: TierConfig | None = None
    """What stands behind its pages; None: nothing."""
    threads_per_rank: int | None = None
    """CPU threads of this rank; None shares the node's cores evenly."""


class Rendezvous(BaseModel):
    """How the ranks of one replica find each other. `token` is new at every (re)start, so generations never mix."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str
    nodes: tuple[str, ...]
    """Node of each world rank: ranks of one node share memory, others use sockets."""
    hosts: tuple[str, ...]
    """Address of each world rank, reachable from every other."""
    store_port: int
    """Port of the key-value store that world rank 0 serves on its address."""
    timeout_s: float = 60.0


class RankLocation(BaseModel):
    """Where a rank really runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    world_rank: int
    node_id: str
    host: str
    """Address at which other ranks reach it."""
    pid: int
    machine: str = ""
    """Names the running system and its network: equal for nodes that share both."""
    name: str = ""
    """What its machine calls itself."""
    interface: str = ""
    """That has the address; empty where nobody says."""


class Loaded(BaseModel):
    """What loading came to. `free_bytes`: device memory left for KV pages (CUDA only)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight_bytes: int
    seconds: float
    free_bytes: int | None = None


class RankStatus(BaseModel):
    """How far a rank is: for progress bars and `shardwright status`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state: Literal["created", "connecting", "loading", "loaded", "running", "failed"]
    loaded_bytes: int = 0
    total_bytes: int = 0
    steps: int = 0


class RankReport(BaseModel):
    """Where a rank is, in the cluster and in its layout, and how far."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    location: RankLocation
    device: str
    """``cpu``, or ``cuda`` with the ids of the GPUs as the node numbers them."""
    coords: dict[str, int]
    status: RankStatus
