"""What a replica is asked to be: model, layout, numbers. One frozen value, made once at the composition root."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from actors.engine.config.options import EngineLimits
from actors.wire.rank_config import Device
from actors.wire.roles import Role
from cluster.replica.options import ReplicaOptions
from placement.layout.layout import Layout
from placement.model.spec import DType, ModelSpec

SHARED_VARIABLES = (
    *("NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_NET_GDR_LEVEL"),
    *("TORCH_NCCL_DUMP_ON_TIMEOUT", "HF_HUB_OFFLINE"),
)
"""Variables of the shell that a deployment is made from which ranks on every node take over. Others stay with their node: names
of interfaces and addresses differ between nodes, and secrets are nobody else's."""


def shared_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What ranks everywhere take over of an environment."""
    return {name: environment[name] for name in SHARED_VARIABLES if name in environment}


class ReplicaSettings(ReplicaOptions, EngineLimits):
    """Everything a replica needs: the options as the user gave them, and what follows from model, layout and machines.

    `kv_bytes` of None lets the device decide.
    """

    model_path: str
    spec: ModelSpec
    layout: Layout
    device: Device
    dtype: DType
    role: Role | None = None
    """What a replica of a pool is for as long as nobody says another; None: there are no pools."""
    environment: dict[str, str] = Field(default={})
    """Of `SHARED_VARIABLES`, those that are set where the deployment was made."""
    deployment: str = ""
    """Names this deployment of the replicas: those that come later know that there was a placement for them."""
    start_timeout_s: float = 600.0
    """Seconds that ranks may take to start and load. No option: tests shorten it."""

    @property
    def in_pool(self) -> bool:
        """Whether it hands off KV, or takes it."""
        return self.role is not None

    @property
    def pool(self) -> str:
        """Which of `cluster.nodes.topology.POOLS`, where nodes may be kept for one: it leaves those of others alone. Empty
        where there are no pools."""
        return self.role or ""
