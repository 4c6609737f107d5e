"""The composition root of the service: typed arguments in, a Ray Serve application out.

    HTTP ──→ Ingress (OpenAI endpoint, text) ──handle──→ Engine replicas ──→ ranks

Used by ``shardwright serve``, ``serve run serve_app.app:build model=…`` and Serve files.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from cluster import topology
from cluster.discover import best_device, discover
from cluster.replica import Replica
from cluster.seats import NODE_ID
from cluster.settings import ReplicaSettings, shared_variables
from placement import checkpoint_header
from placement.seating import seat_all
from serve_app.catalog import resolve
from serve_app.handle_backend import HandleBackend
from serve_app.names import ENGINE, INGRESS
from serve_app.openai.api import ApiSettings, create_api
from serve_app.preflight import check_files
from serve_app.router import EngineRouter
from serve_app.served_model import ServedModel
from serve_app.settings import ServeArgs, parse_args, read_api_keys, replica_settings, served_name

_ONGOING = 100_000
"""The engine queues and refuses by its own rules; Serve shall not queue before it."""


class EngineReplica(Replica):
    """A `Replica` that takes its name from Serve. `settings`: what the application came to where it was made on the cluster."""

    def __init__(self, args: ServeArgs, settings: ReplicaSettings | None) -> None:
        super().__init__(settings or settings_in_cluster(args), str(serve.get_replica_context().replica_id.unique_id))


class Ingress:
    """The HTTP face: owns the truth of each request, and hands tokens to and from an engine replica."""

    def __init__(self, args: ServeArgs, settings: ReplicaSettings | None, engine: DeploymentHandle[Any]) -> None:
        self._model = served_model(args, settings or settings_in_cluster(args))
        # Serve's proxy puts the request's own id on the answer, or the one it gave it.
        self._settings = ApiSettings(api_keys=read_api_keys(args), request_id_on_answers=False)
        self._backend = HandleBackend(engine, args.replica_wait_s)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_api(self._model, self._backend, self._settings)


def settings_in_cluster(args: ServeArgs) -> ReplicaSettings:
    """What `args` come to on the connected cluster, or once its nodes have started. Raises `ModelError` or `LayoutError`."""
    device = args.device if args.device != "auto" else best_device()
    return replica_settings(args, device, None if args.nodes_wait_s else discover(device))


def served_model(args: ServeArgs, settings: ReplicaSettings) -> ServedModel:
    """The model as the endpoint sees it: name, limits, tokenizer and template."""
    files = resolve(args.model)
    return ServedModel.open(
        name=served_name(args, files),
        path=files.path,
        spec=settings.spec,
        max_model_len=settings.max_model_len,
        created=int(time.time()),
    )


def build(arguments: dict[str, Any]) -> Application:
    """The Serve application for the arguments of `ServeArgs`. Raises `ArgumentError`, `ModelError` or `LayoutError`."""
    args = parse_args(arguments)  # not annotated as `ServeArgs`: Serve's own check tells mistakes less well
    app = application(args)
    path = resolve(args.model).path
    check_files(path, checkpoint_header.read(path))
    return app


def application(args: ServeArgs) -> Application:
    """See `build`, without its look into the model's files, which ``shardwright serve`` takes before it starts Ray."""
    # `serve run` calls this before it connects to Ray: then only what the model itself allows can be checked.
    known = _settled(args) if ray.is_initialized() else None
    settings = known or replica_settings(args, "cpu")
    engine: Any = serve.deployment(
        EngineReplica,
        name=ENGINE,
        num_replicas=settings.layout.replicas,
        max_replicas_per_node=_most_a_node(settings) if known else None,  # type: ignore[arg-type]
        max_ongoing_requests=_ONGOING,
        ray_actor_options=_beside_ranks(settings) if known else {"num_cpus": 0},
        request_router_config=RequestRouterConfig(request_router_class=EngineRouter),  # type: ignore[arg-type]
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=10,
        max_constructor_retry_count=1,
    )
    ingress: Any = serve.deployment(
        serve.ingress()(Ingress),
        name=INGRESS,
        max_ongoing_requests=_ONGOING,
        ray_actor_options=_entrance(args, known),
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=5,
        max_constructor_retry_count=1,
    )
    app: Application = ingress.bind(args, known, engine.bind(args, known))
    return app


def _settled(args: ServeArgs) -> ReplicaSettings:
    """Settings that do not change when a node comes or goes later, for one deployment."""
    return settings_in_cluster(args).model_copy(
        update={"deployment": secrets.token_hex(8), "environment": shared_variables(os.environ)}
    )


def _beside_ranks(settings: ReplicaSettings) -> dict[str, Any]:
    """An engine lives on a node that has slots, so that it is lost with its ranks and not with another node."""
    without = topology.slotless(ray.nodes(), settings.device)
    others = settings.nodes_wait_s or len(without) < sum(node["Alive"] for node in ray.nodes())
    return {"num_cpus": 0} | ({"label_selector": {NODE_ID: f"!in({', '.join(without)})"}} if without and others else {})


def _most_a_node(settings: ReplicaSettings) -> int | None:
    """Engines a node gets at most: as many as replicas have their first ranks on one, so that both live together."""
    seatings = seat_all(settings.layout, settings.spec, discover(settings.device))
    return max(Counter(seating.nodes[0] for seating in seatings).values()) if seatings else None


def _entrance(args: ServeArgs, known: ReplicaSettings | None) -> dict[str, Any]:
    """Where the HTTP process lives."""
    if known is None:
        return {"num_cpus": 0}
    return _on_head() if args.entrance == "head" else _beside_ranks(known)


def _on_head() -> dict[str, Any]:
    """The HTTP process lives where Serve's proxy is; on any node where that is not possible."""
    head = topology.head_of(ray.nodes())
    if head is None:
        return {"num_cpus": 0}
    anywhere = [{"label_selector": {NODE_ID: "!none"}}]
    return {"num_cpus": 0, "label_selector": {NODE_ID: head}, "fallback_strategy": anywhere}
