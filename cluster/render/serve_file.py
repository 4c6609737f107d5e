"""The Serve file of a deployment: what `serve deploy` and KubeRay's `serveConfigV2` read."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from placement.fleet import Fleet
from placement.layout import Layout

HTTP_PORT = 8000
NODES_WAIT_S = 3600.0
"""Machines may take so long to start, images to be pulled included."""


class Deployment(BaseModel):
    """What is to run: the model as its machines see it (`model`), the layout, and the machines.

    `import_path` is the application's builder, `ingress` and `engine` the names of its deployments.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    model: str
    layout: Layout
    fleet: Fleet
    import_path: str
    ingress: str
    engine: str
    served_name: str | None = None
    api_keys_file: str | None = None


def serve_file(deployment: Deployment, entrance_on_head: bool) -> dict[str, Any]:
    """The file as plain values.

    `entrance_on_head`: one HTTP process, on the head. Else one on each machine that has slots, so that none of them is special
    and the service answers while the head is away.
    """
    arguments: dict[str, Any] = {
        "model": deployment.model,
        "layout": str(deployment.layout),
        "device": deployment.fleet.machine.kind,
        "entrance": "head" if entrance_on_head else "anywhere",
        "nodes_wait_s": NODES_WAIT_S,
    }
    given = {"served_name": deployment.served_name, "api_keys_file": deployment.api_keys_file}
    arguments |= {name: value for name, value in given.items() if value is not None}
    ingress: dict[str, Any] = {"name": deployment.ingress, "num_replicas": 1}
    if not entrance_on_head:
        ingress = {"name": deployment.ingress, "num_replicas": deployment.fleet.machines, "max_replicas_per_node": 1}
    engine = {
        "name": deployment.engine,
        "num_replicas": deployment.layout.replicas,
        "max_replicas_per_node": deployment.fleet.replicas_a_group,
    }
    return {
        "proxy_location": "HeadOnly" if entrance_on_head else "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": HTTP_PORT},
        "applications": [
            {
                "name": deployment.name,
                "route_prefix": "/",
                "import_path": deployment.import_path,
                "args": arguments,
                "deployments": [ingress, engine],
            }
        ],
    }
