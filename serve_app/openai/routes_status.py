"""Routes for the operator of the server; they need no key."""

from __future__ import annotations

import logging
from importlib import metadata

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from serve_app.openai.response.encoding import json_response
from serve_app.openai.response.metrics import Metrics, exposition
from serve_app.routing.backend import Backend, Health

_log = logging.getLogger("shardwright.api")


def add_status(router: APIRouter, backend: Backend, metrics: Metrics) -> None:
    """Add the routes ``/health`` (503 if `backend` cannot serve), ``/metrics`` (Prometheus text of `metrics` and of the
    backend's gauges) and ``/version`` to `router`."""

    @router.get("/health")
    async def health() -> Response:
        try:
            found = await backend.health()
        except Exception as error:
            _log.warning("the backend did not report its health", exc_info=error)
            found = Health(False, "the backend did not report its health")
        status = "unhealthy" if not found.ok else "degraded" if found.reason else "ok"
        body = {"status": status, "reason": found.reason, "replicas": found.replicas}
        return json_response(body, 200 if found.ok else 503)

    @router.get("/metrics")
    async def prometheus() -> Response:
        try:
            stats = await backend.stats()
        except Exception as error:
            # The endpoint's own metrics matter most when the backend is in trouble.
            _log.warning("the backend did not report its stats", exc_info=error)
            stats = {}
        return Response(exposition(metrics, stats, backend.gauges()), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": metadata.version("shardwright")})
