"""The Ray Serve configuration file of a deployment, which `serve deploy` and KubeRay's `serveConfigV2` read."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from placement.layout.layout import Layout
from placement.nodes.fleet import Fleet, Machine

HTTP_PORT = 8000
NODES_WAIT_S = 3600.0
"""Seconds that machines may take to start, including the time to pull images."""


class ReplicaPool(BaseModel):
    """The replicas of one layout.

    `name` is the name of their deployment in Ray Serve, `argument` the argument of the application that contains the layout
    (``layout``, or ``prefill`` and ``decode``), and `fleet` the machines that the replicas need.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    argument: str
    layout: Layout
    fleet: Fleet

    @property
    def text(self) -> str:
        """The value of the application's argument: ``tp=2,replicas=3`` for ``layout``, ``tp=2*3`` for a pool."""
        if self.argument == "layout":
            return str(self.layout)
        return f"{self.layout.model_copy(update={'replicas': 1})}*{self.layout.replicas}"


class MachineGroup(BaseModel):
    """Machines of one kind for the replicas of one pool, or of all pools if `pool` is None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    pool: str | None
    fleet: Fleet


class Deployment(BaseModel):
    """The deployment to render: its model, its pools of replicas, and their machines.

    `model` is the path or name of the model as the machines see it, `import_path` the application's builder, and `ingress` the
    name of the ingress deployment.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    model: str
    pools: tuple[ReplicaPool, ...]
    import_path: str
    ingress: str
    settings: dict[str, Any] = {}
    """Further arguments of the application, as plain values."""

    @property
    def groups(self) -> tuple[MachineGroup, ...]:
        """The machine groups: one per pool, or a single group, open to all pools, if there is one pool, or if all pools have
        the same kind of machine and one of these has slots for all ranks."""
        first = self.pools[0].fleet
        alike = len({pool.fleet.machine for pool in self.pools}) == 1
        if len(self.pools) == 1 or (alike and sum(pool.layout.devices for pool in self.pools) <= self.machine.slots):
            return (MachineGroup(name="ranks", pool=None, fleet=first),)
        return tuple(MachineGroup(name=pool.argument, pool=pool.argument, fleet=pool.fleet) for pool in self.pools)

    @property
    def machine(self) -> Machine:
        """The kind of machine that the replicas run on; if the pools differ, that of the first pool."""
        return self.pools[0].fleet.machine

    @property
    def machines(self) -> int:
        """The total number of machines of all groups."""
        return sum(group.fleet.machines for group in self.groups)

    def __str__(self) -> str:
        if len(self.pools) == 1:
            return self.pools[0].text
        return " and ".join(f"{pool.argument}={pool.text}" for pool in self.pools)


def serve_file(deployment: Deployment, ingress_on_head: bool) -> dict[str, Any]:
    """Returns the content of the Serve configuration file of a deployment, as plain values for YAML.

    With `ingress_on_head`, one HTTP process runs on the head. Otherwise as many run as there are machines, at most one on each,
    so that the service answers even while the head is down.
    """
    arguments: dict[str, Any] = {
        "model": deployment.model,
        **{pool.argument: pool.text for pool in deployment.pools},
        "device": deployment.machine.kind,
        "ingress_node": "head" if ingress_on_head else "anywhere",
        "nodes_wait_s": NODES_WAIT_S,
        **deployment.settings,
    }
    ingress: dict[str, Any] = {"name": deployment.ingress, "num_replicas": 1}
    if not ingress_on_head:
        ingress = {"name": deployment.ingress, "num_replicas": deployment.machines, "max_replicas_per_node": 1}
    engines = [
        {"name": pool.name, "num_replicas": pool.layout.replicas, "max_replicas_per_node": pool.fleet.replicas_a_group}
        for pool in deployment.pools
    ]
    return {
        "proxy_location": "HeadOnly" if ingress_on_head else "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": HTTP_PORT},
        "applications": [
            {
                "name": deployment.name,
                "route_prefix": "/",
                "import_path": deployment.import_path,
                "args": arguments,
                "deployments": [ingress, *engines],
            }
        ],
    }
