"""What a replica is asked to be: model, layout, numbers. One frozen value, made once at the composition root."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from actors.engine.config.balancing import USUAL_INTERVAL
from actors.wire.rank_config import Device
from actors.wire.roles import Role
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec

DEFAULT_CONTEXT = 8192
"""Longest sequence served unless asked otherwise (or the model's own limit, where that is shorter), in tokens."""

DEFAULT_KV_BYTES = 2**30
"""KV cache of a CPU rank unless asked otherwise. Pages are touched only when used."""

DEFAULT_DISK_BYTES = 16 * 2**30
"""What a directory for KV blocks may take unless asked otherwise."""

SHARED_VARIABLES = (
    *("NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_NET_GDR_LEVEL"),
    *("TORCH_NCCL_DUMP_ON_TIMEOUT", "HF_HUB_OFFLINE"),
)
"""Variables of the shell that a deployment is made from which ranks on every node take over. Others stay with their node: names
of interfaces and addresses differ between nodes, and secrets are nobody else's."""

PositiveSetting = Annotated[int, Field(ge=1)]


def shared_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What ranks everywhere take over of an environment."""
    return {name: environment[name] for name in SHARED_VARIABLES if name in environment}


class ReplicaSettings(BaseModel):
    """Everything a replica needs. `kv_bytes` is per rank; None lets the device decide."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_path: str
    spec: ModelSpec
    layout: Layout = Layout()
    device: Device = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    max_model_len: PositiveSetting
    kv_bytes: PositiveSetting | None = None
    host_cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Host memory for KV blocks that the device gave up, per rank."""
    disk_cache: Path | None = None
    """A directory for KV blocks, which may be shared; None: none."""
    disk_cache_bytes: PositiveSetting = DEFAULT_DISK_BYTES
    max_batch_tokens: PositiveSetting = 2048
    max_sequences: PositiveSetting = 64
    max_waiting: PositiveSetting = 1024
    plans_in_flight: Annotated[int, Field(ge=1, le=16)] | None = None
    """See `EngineConfig`."""
    threads_per_rank: PositiveSetting | None = None
    rebalance_every: Annotated[int, Field(ge=0)] = USUAL_INTERVAL
    rebalance_skew: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Both: see `Balancing`."""
    role: Role | None = None
    """What a replica of a pool is for as long as nobody says another; None: there are no pools."""
    environment: dict[str, str] = {}
    """Of `SHARED_VARIABLES`, those that are set where the deployment was made."""
    deployment: str = ""
    """Names this deployment of the replicas: those that come later know that there was a placement for them."""
    nodes_wait_s: Annotated[float, Field(ge=0)] = 0.0
    """How long the first replicas wait for nodes that are still to start; 0: what does not fit is refused at once."""
    start_timeout_s: float = 600.0
    step_timeout_s: float = 60.0

    @property
    def in_pool(self) -> bool:
        """Whether it hands off KV, or takes it."""
        return self.role is not None

    @property
    def pool(self) -> str:
        """Which of `cluster.nodes.topology.POOLS`, where nodes may be kept for one: it leaves those of others alone. Empty
        where there are no pools."""
        return self.role or ""
