"""The composition root of the service: typed arguments in, a Ray Serve application out.

    HTTP ──→ Ingress (OpenAI endpoint, text) ──handle──→ Engine replicas ──→ ranks
                                             └─handle──→ Prefill, Mixed replicas ─→ ranks      with --prefill, --mixed

Used by ``shardwright serve``, ``serve run serve_app.app:build model=…`` and Serve files.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from actors.wire.roles import Role
from cluster.nodes import topology
from cluster.nodes.discover import best_device, discover
from cluster.replica import failures
from cluster.replica.placement_group import NODE_ID, none_at_all
from cluster.replica.placement_wait import PlacementError
from cluster.replica.replica import Replica
from cluster.replica.roles import RoleReport
from cluster.replica.settings import ReplicaSettings, shared_variables
from placement.checkpoint import header
from placement.nodes.assignment import assign_replicas
from serve_app.deployment.catalog import resolve
from serve_app.deployment.deployment_names import ENGINE, INGRESS
from serve_app.deployment.pools import Service, layouts, service
from serve_app.deployment.preflight import check_files
from serve_app.deployment.served_model import ServedModel
from serve_app.deployment.settings import ServeArgs, parse_args, read_api_keys
from serve_app.openai.api import ApiSettings, create_api
from serve_app.routing.handle_backend import HandleBackend
from serve_app.routing.pooled_backend import PooledBackend
from serve_app.routing.role_change import RoleRefused
from serve_app.routing.router import EngineRouter

_ONGOING = 100_000
"""Request limit for Serve, too high to be reached: the engine queues and refuses requests by its own rules."""


class EngineReplica(Replica):
    """A `Replica` that takes its name from Serve. `settings`: the replica's settings; None if the application was built before
    the cluster was known."""

    def __init__(self, args: ServeArgs, settings: ReplicaSettings | None, pool: str = ENGINE) -> None:
        context = serve.get_replica_context()
        with failures.storing_errors(context.app_name, context.deployment):
            found = settings or settings_in_cluster(args).by_name[pool]
            super().__init__(found, str(context.replica_id.unique_id))


class Ingress:
    """The HTTP process: it owns the state of each request, sends requests to an engine replica and receives the tokens."""

    def __init__(self, args: ServeArgs, settings: ReplicaSettings | None, pools: Mapping[str, DeploymentHandle[Any]]) -> None:
        """`pools`: the handles of the replicas by deployment, beginning with those that answer requests."""
        context = serve.get_replica_context()
        with failures.storing_errors(context.app_name, context.deployment):
            known = settings or settings_in_cluster(args).engine
            self._model = served_model(args, known)
        # Serve's proxy already puts the request id, the caller's or its own, on the answer.
        self._settings = ApiSettings(
            api_keys=read_api_keys(args),
            allow_origins=args.allow_origins,
            sse_ping_s=args.sse_ping_s,
            request_id_on_answers=False,
        )
        waits = {"wait_s": args.replica_wait_s, "replay_wait_s": args.replay_wait_s}
        deployed = sum(layout.replicas for layout in layouts(args).values())
        self._pooled = PooledBackend(pools, args.require_prefill, deployed, **waits) if known.in_pool else None
        self._backend = self._pooled or HandleBackend(next(iter(pools.values())), deployed, **waits)

    async def check_health(self) -> None:
        """Return once the first trial hand-off between the pools has ended, or after 60 s; at once if there are no pools.

        Ray Serve calls this health probe and waits for the first one, so that no endpoint exists before.
        """
        if self._pooled is not None:
            await self._pooled.started()

    async def roles(self) -> list[RoleReport]:
        """Returns the role report of each replica, by pool and name; an empty list if there are no pools."""
        return [] if self._pooled is None else await self._pooled.roles()

    async def change_role(self, replica: str, role: str, within_s: float) -> RoleReport | str:
        """Request that the replica named `replica` become `role` (``prefill``, ``decode`` or ``mixed``) within `within_s`
        seconds.

        Returns the state of the change, which goes on after the call, or the reason for a refusal as text. Raises `ValueError`
        if `role` is no role.
        """
        if self._pooled is None:
            return "roles are those of replicas in pools, and this service has none: serve with --prefill, --decode or --mixed"
        try:
            return await self._pooled.change_role(replica, Role(role), within_s)
        except RoleRefused as refused:
            return str(refused)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_api(self._model, self._backend, self._settings)


def settings_in_cluster(args: ServeArgs) -> Service:
    """Returns the settings of the service on the connected Ray cluster. With ``args.nodes_wait_s``, the cluster may still be
    waiting for its nodes, and is not checked.

    Raises `ModelError` or `LayoutError` if the model cannot be read or the layout is illegal or does not fit, and
    `PlacementError` if no node has the resources of a rank.
    """
    device = args.device if args.device != "auto" else best_device()
    reason = None if args.nodes_wait_s else none_at_all(device)
    if reason is not None:
        raise PlacementError(reason)
    return service(args, device, None if args.nodes_wait_s else discover(device))


def served_model(args: ServeArgs, settings: ReplicaSettings) -> ServedModel:
    """Returns the model as the endpoint needs it: its name (`args.served_name`, or else that of its files), its limits from
    `settings`, and the tokenizer and chat template of its files (None if there is none).

    A model named by a hub id is downloaded, weights included, unless it is in the local cache.

    Raises `ModelError` if its files are not found or
    cannot be downloaded, and `TokenizerError` or `TemplateError` if they cannot be used.
    """
    files = resolve(args.model)
    return ServedModel.open(
        name=args.served_name or files.name,
        path=files.path,
        spec=settings.spec,
        max_model_len=settings.max_model_len,
        created=int(time.time()),
    )


def build(arguments: dict[str, Any]) -> Application:
    """Build the Serve application for `arguments`, the fields of `ServeArgs` as plain values. This is the import path in Serve
    files.

    Returns the application, which does not run yet. Raises `ArgumentError` for an unknown or invalid argument, `ModelError` if
    the model's files are missing or wrong, `LayoutError` if the layout is illegal or does not fit, and `PlacementError` if no
    node of the connected cluster has the resources of a rank.
    """
    args = parse_args(arguments)  # not annotated as `ServeArgs`: the errors of Serve's own check are less clear
    app = application(args)
    path = resolve(args.model).path
    check_files(path, header.read(path))
    return app


def application(args: ServeArgs) -> Application:
    """Build the application, as `build` does, but from parsed arguments and without a check of the model's weight and text
    files, which ``shardwright serve`` makes before it starts Ray.

    If Ray is not connected yet, layout and memory are not checked against the cluster. Raises `ModelError`, `LayoutError` or
    `PlacementError`, as `build` does.
    """
    # `serve run` calls this before it connects to Ray: then only the limits of the model can be checked.
    is_known = ray.is_initialized()
    served = _settled(args) if is_known else service(args, "cpu")
    engines = {name: _engine(args, name, settings, is_known) for name, settings in served.by_name.items()}
    known = served.engine if is_known else None
    ingress: Any = serve.deployment(
        serve.ingress()(Ingress),
        name=INGRESS,
        max_ongoing_requests=_ONGOING,
        ray_actor_options=_ingress_options(args, known),
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=5,
        max_constructor_retry_count=1,
    )
    app: Application = ingress.bind(args, known, engines)
    return app


def _engine(args: ServeArgs, name: str, settings: ReplicaSettings, is_known: bool) -> Application:
    """Returns the replicas of one pool. `is_known`: whether the settings are based on the cluster on which they will run."""
    engine: Any = serve.deployment(
        EngineReplica,
        name=name,
        num_replicas=settings.layout.replicas,
        max_replicas_per_node=_most_a_node(settings) if is_known else None,  # type: ignore[arg-type]
        max_ongoing_requests=_ONGOING,
        ray_actor_options=_beside_ranks(settings) if is_known else {"num_cpus": 0},
        request_router_config=RequestRouterConfig(request_router_class=EngineRouter),  # type: ignore[arg-type]
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=10,
        max_constructor_retry_count=1,
    )
    app: Application = engine.bind(args, settings if is_known else None, name)
    return app


def _settled(args: ServeArgs) -> Service:
    """Returns the settings of one deployment, fixed now so that they do not change when a node comes or goes later."""
    found, name = settings_in_cluster(args).with_each(environment=shared_variables(os.environ)), secrets.token_hex(8)
    return Service(
        {pool: each.model_copy(update={"deployment": f"{name}-{pool.lower()}"}) for pool, each in found.by_name.items()}
    )


def _beside_ranks(settings: ReplicaSettings) -> dict[str, Any]:
    """Returns actor options that place an engine on a node with slots for its pool, so that it is lost together with its ranks
    and not with another node."""
    return _on(_with_slots(settings) | topology.pool_selector(settings.pool))


def _on(selector: dict[str, str]) -> dict[str, Any]:
    return {"num_cpus": 0} | ({"label_selector": selector} if selector else {})


def _with_slots(settings: ReplicaSettings) -> dict[str, str]:
    """Returns a label selector for the nodes with slots; an empty one if no node or every node has slots."""
    without = topology.slotless(ray.nodes(), settings.device)
    others = settings.nodes_wait_s or len(without) < sum(node["Alive"] for node in ray.nodes())
    return {NODE_ID: f"!in({', '.join(without)})"} if without and others else {}


def _most_a_node(settings: ReplicaSettings) -> int | None:
    """Returns the maximum number of engines on one node: the largest number of replicas whose first rank is on the same
    node."""
    assignments = assign_replicas(settings.layout, settings.spec, discover(settings.device, settings.pool))
    return max(Counter(assignment.nodes[0] for assignment in assignments).values()) if assignments else None


def _ingress_options(args: ServeArgs, known: ReplicaSettings | None) -> dict[str, Any]:
    """Returns the actor options that select the node of the HTTP process. `known`: None before the cluster is known."""
    if known is None:
        return {"num_cpus": 0}
    return _on_head() if args.ingress_node == "head" else _on(_with_slots(known))


def _on_head() -> dict[str, Any]:
    """Returns options that place the HTTP process on the head node, where Serve's proxy runs, or on any node if that is not
    possible."""
    head = topology.head_of(ray.nodes())
    if head is None:
        return {"num_cpus": 0}
    anywhere = [{"label_selector": {NODE_ID: "!none"}}]
    return {"num_cpus": 0, "label_selector": {NODE_ID: head}, "fallback_strategy": anywhere}
