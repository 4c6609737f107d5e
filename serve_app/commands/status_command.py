"""``shardwright status``: the deployments, the replicas with their state, and the actual node of each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from placement.explain.columns import columns
from serve_app.commands.connection import connected
from serve_app.deployment.applications import chosen

if TYPE_CHECKING:
    from cluster.replica.status import ClusterState, DeploymentState


def run_status(address: str | None, as_json: bool, name: str | None = None) -> None:
    """Print the state of the application `name` (None: see `serve_app.deployment.applications`) on the cluster at `address`
    (None: the one that is found), as JSON with `as_json`.

    Exits with 1 unless it runs, and with 2 if no cluster answers or several applications match.
    """
    state = _state(address, name)
    typer.echo(state.model_dump_json() if as_json else "\n".join(_lines(state)))
    if state.application != "RUNNING":
        raise typer.Exit(1)


def _state(address: str | None, asked: str | None) -> ClusterState:
    with connected(address):
        from cluster.nodes.discover import best_device, discover
        from cluster.replica.status import cluster_state, serve_details
        from serve_app.commands.role_command import role_reports

        names = {node.id: node.name for node in discover(best_device()).nodes}
        details = serve_details()
        name = chosen(details, asked)
        runs = details.get("applications", {}).get(name, {}).get("status") == "RUNNING"
        return cluster_state(details, name, names, role_reports(name) if runs else ())


def _lines(state: ClusterState) -> Iterator[str]:
    yield f"application {state.application}{f': {state.message}' if state.message else ''}"
    for deployment in state.deployments:
        yield f"{deployment.name} {deployment.status}{f': {deployment.message}' if deployment.message else ''}"
        yield from _replicas(deployment)


def _replicas(deployment: DeploymentState) -> Iterator[str]:
    for replica in deployment.replicas:
        role = f" ({replica.role})" if replica.role else ""
        yield f"  replica {replica.id} {replica.state}{role} on {replica.node or 'no node yet'}, process {replica.pid or '-'}"
        rows = [("rank", "at", "state", "steps", "node", "process", "device")]
        for rank in replica.ranks:
            at = " ".join(f"{axis} {index}" for axis, index in rank.coords.items())
            rows.append((str(rank.world_rank), at, rank.state, str(rank.steps), rank.node, str(rank.pid), rank.device))
        if replica.ranks:
            yield from (f"  {line}" for line in columns(rows, right={0, 3, 5}))
