"""The settings of a replica: model, layout and options, as one frozen value that the composition root creates once."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ConfigDict, Field

from actors.engine.config.options import EngineLimits
from actors.wire.rank_config import Device
from actors.wire.roles import Role
from cluster.replica.options import ReplicaOptions
from placement.cost.activations import StepLimits
from placement.layout.layout import Layout
from placement.model.spec import DType, ModelSpec

SHARED_VARIABLES = (
    *("NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_NET_GDR_LEVEL"),
    *("TORCH_NCCL_DUMP_ON_TIMEOUT", "HF_HUB_OFFLINE"),
)
"""Environment variables that are copied from the deploying shell to the ranks on every node. No others are copied: names of
interfaces and addresses differ between nodes, and secrets must not leave the shell."""


def shared_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of `environment` that ranks on every node get too: those that `SHARED_VARIABLES` lists
    and that are set."""
    return {name: environment[name] for name in SHARED_VARIABLES if name in environment}


class ReplicaSettings(ReplicaOptions, EngineLimits):
    """Everything that a replica needs: the user's options, and the values derived from model, layout and machines.

    If `kv_bytes` is None, the free memory of the device determines the size of the KV cache.
    """

    model_config = ConfigDict(title="ReplicaSettings")

    model_path: str
    spec: ModelSpec
    layout: Layout
    device: Device
    dtype: DType
    role: Role | None = None
    """The initial role of a replica in a prefill or decode pool; None if there are no pools."""
    environment: dict[str, str] = Field(default={})
    """The `SHARED_VARIABLES` that were set in the deploying shell."""
    deployment: str = ""
    """Identifies the deployment. A restarted replica uses it to find out that there was a placement for it before."""
    start_timeout_s: float = 600.0
    """Seconds that the ranks may take to start and load. Not a user option; tests shorten it."""

    @property
    def step_limits(self) -> StepLimits:
        """The largest step of a rank, which determines the memory of its activations."""
        return StepLimits(self.max_batch_tokens, self.max_sequences, self.max_model_len)

    @property
    def in_pool(self) -> bool:
        """Whether the replica is in a pool (it has a role), so that it sends or receives KV hand-offs."""
        return self.role is not None

    @property
    def pool(self) -> str:
        """The pool of the replica, one of `cluster.nodes.topology.POOLS`; empty if there are no pools.

        Nodes that are reserved for another pool are not used.
        """
        return self.role or ""
