"""The status of the connected cluster: the application's deployments, their replicas, and the location of each rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict

from actors.wire.rank_config import RankReport
from cluster.nodes.discover import discover
from cluster.replica.launch import rank_reports
from cluster.replica.roles import RoleReport
from cluster.replica.settings import ReplicaSettings
from placement.cost.crossings import crossing_lines, link_loads
from placement.cost.step_shape import StepShape

_ANSWER_S = 10.0
"""Seconds that Serve's controller has to answer."""


class PlacedRank(BaseModel):
    """One rank of one replica. `node` is the address of its node, or the node's name if several nodes share one address."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    world_rank: int
    coords: dict[str, int]
    state: str
    steps: int
    node: str
    node_id: str
    host: str
    pid: int
    device: str


class ReplicaState(BaseModel):
    """One Ray Serve replica, with those of its ranks that answer. `role` is its role and the one it is changing to; empty if
    there are no pools."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    state: str
    node: str
    pid: int | None
    role: str = ""
    ranks: tuple[PlacedRank, ...] = ()


class DeploymentState(BaseModel):
    """One deployment of the application, as Ray Serve reports it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    status: str
    message: str
    replicas: tuple[ReplicaState, ...]


class ClusterState(BaseModel):
    """The state of the application. `application` is its status in Ray Serve, or ``NOT_STARTED``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    application: str
    message: str = ""
    deployments: tuple[DeploymentState, ...] = ()


def cluster_state(
    details: dict[str, Any], name: str, node_names: dict[str, str], role_reports: Sequence[RoleReport] = ()
) -> ClusterState:
    """Returns the state of the application `name`: its deployments, their replicas, and the ranks that answer, which are asked
    now.

    `details` are those of `serve_details`. `node_names` contains the names of the nodes by Ray node id. `role_reports` are the
    roles of its replicas, as far as they are known. If there is no such application, the state is ``NOT_STARTED``, with the
    names of the others as its message.
    """
    application = details.get("applications", {}).get(name)
    if application is None:
        others = ", ".join(sorted(details.get("applications", {})))
        return ClusterState(application="NOT_STARTED", message=f"there is no {name}, but {others}" if others else "")
    reports, roles = rank_reports(), {each.name: str(each) for each in role_reports}
    return ClusterState(
        application=application["status"],
        message=application.get("message") or "",
        deployments=tuple(
            _deployment(each, reports, node_names, roles) for each in sorted(application["deployments"].values(), key=_by_name)
        ),
    )


def replica_ids(details: dict[str, Any], name: str, deployment: str) -> set[str]:
    """Returns the ids of the replicas of the deployment `deployment` of the application `name`, from `details` (see
    `serve_details`); an empty set if there is no such deployment."""
    deployments = details.get("applications", {}).get(name, {}).get("deployments", {})
    return {each["replica_id"] for each in deployments.get(deployment, {}).get("replicas", ())}


def slow_crossings(settings: ReplicaSettings, replicas: Collection[str]) -> list[str]:
    """Returns lines of text about the traffic of `replicas` (ids) over slow links between nodes, for a decode step of one token
    per DP rank; empty if there are none.

    The traffic follows from `settings` and the actual locations of the ranks, which are asked now; replicas of which a rank
    does not answer are left out. Equal lines of several replicas appear once.
    """
    cluster = discover(settings.device)
    if not any(cluster.is_slow(0, other) for other in range(len(cluster.nodes))):
        return []
    ids = [node.id for node in cluster.nodes]
    nodes_by_replica: dict[str, dict[int, int]] = {}
    for name, report in rank_reports().items():
        replica = name.rpartition("-rank-")[0]
        if report.location.node_id in ids and replica.rpartition("-")[0] in replicas:
            nodes_by_replica.setdefault(replica, {})[report.location.world_rank] = ids.index(report.location.node_id)
    layout = settings.layout
    step = StepShape.of(layout.attn_dp, 1, dtype=settings.dtype, dp_size=layout.attn_dp)
    whole = [[home[rank] for rank in range(layout.world)] for home in nodes_by_replica.values() if len(home) == layout.world]
    loads = [link_loads(settings.spec, layout, step, cluster, ranks) for ranks in whole]
    return list(dict.fromkeys(line for each in loads for line in crossing_lines(cluster, each, only_slow=True)))


def serve_details() -> dict[str, Any]:
    """Returns the details (``ServeInstanceDetails``, as plain values) that Ray Serve's controller has about its applications;
    empty if Serve does not run. Raises a Ray error if the controller does not answer in 10 s."""
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return {}
    call: Any = controller.get_serve_instance_details.remote()
    try:
        found: dict[str, Any] = ray.get(call, timeout=_ANSWER_S)
    except ray.exceptions.GetTimeoutError as error:
        raise ray.exceptions.GetTimeoutError(f"Ray Serve's controller did not answer in {_ANSWER_S:g} s") from error
    return found


def _deployment(
    found: dict[str, Any], reports: dict[str, RankReport], node_names: dict[str, str], roles: dict[str, str]
) -> DeploymentState:
    replicas = tuple(
        _replica(each, reports, node_names, roles) for each in sorted(found["replicas"], key=lambda each: each["replica_id"])
    )
    return DeploymentState(name=found["name"], status=found["status"], message=found.get("message") or "", replicas=replicas)


def _replica(
    found: dict[str, Any], reports: dict[str, RankReport], node_names: dict[str, str], roles: dict[str, str]
) -> ReplicaState:
    """Returns the state of a replica. The names of its rank actors begin with its id (`cluster.replica.launch`)."""
    name = found["replica_id"]
    ranks = [_rank(report, node_names) for actor, report in reports.items() if actor.startswith(f"{name}-")]
    return ReplicaState(
        id=name,
        state=found["state"],
        node=node_names.get(found.get("node_id") or "", found.get("node_ip") or ""),
        pid=found.get("pid"),
        role=roles.get(name, ""),
        ranks=tuple(sorted(ranks, key=lambda rank: rank.world_rank)),
    )


def _rank(report: RankReport, node_names: dict[str, str]) -> PlacedRank:
    location, status = report.location, report.status
    return PlacedRank(
        world_rank=location.world_rank,
        coords=report.coords,
        state=status.state,
        steps=status.steps,
        node=node_names.get(location.node_id, location.host),
        node_id=location.node_id,
        host=location.host,
        pid=location.pid,
        device=report.device,
    )


def _by_name(deployment: dict[str, Any]) -> str:
    return str(deployment["name"])
