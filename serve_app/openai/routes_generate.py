"""The two routes that generate text."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serve_app.deployment.served_model import ServedModel
from serve_app.openai import chat, completions
from serve_app.openai.request.body import read_object
from serve_app.openai.request.errors import unknown_model
from serve_app.openai.request.plan import Origin
from serve_app.openai.request.schema import ChatFields, CompletionFields
from serve_app.openai.request.settings import ApiSettings
from serve_app.openai.request.timeout import timeout_of
from serve_app.openai.response.answer import Answering, as_api_error
from serve_app.openai.response.disconnect import ClientGone
from serve_app.openai.response.metrics import CLIENT_GONE, Metrics
from serve_app.openai.response.response_builder import Job
from serve_app.routing.backend import Backend

MakeJob = Callable[[dict[str, Any], Origin], Awaitable[Job]]


def add_generation(router: APIRouter, model: ServedModel, backend: Backend, settings: ApiSettings, metrics: Metrics) -> None:
    """Add the routes ``/v1/completions`` and ``/v1/chat/completions`` to `router`. Their requests run on `backend` and are
    counted in `metrics`."""

    async def completion_job(body: dict[str, Any], origin: Origin) -> Job:
        fields = CompletionFields.parse(body)
        check_model(model, fields.model)
        return await completions.job(model, settings, fields, origin, int(time.time()))

    async def chat_job(body: dict[str, Any], origin: Origin) -> Job:
        fields = ChatFields.parse(body)
        check_model(model, fields.model)
        return await chat.job(model, settings, fields, origin, int(time.time()))

    async def run(request: Request, endpoint: str, make_job: MakeJob) -> Response:
        observation = metrics.begin(endpoint)
        try:
            body = await read_object(request, settings.max_body_bytes)
            job = await make_job(body, _origin(request))
            return await Answering(job, backend, settings, observation).answer(request.receive)
        except (ClientGone, ClientDisconnect):
            observation.close(CLIENT_GONE)
            return Response(status_code=CLIENT_GONE)
        except asyncio.CancelledError:
            observation.close(CLIENT_GONE)
            raise
        except Exception as failure:
            error = as_api_error(failure, settings)
            observation.close(error.status)
            raise error from (None if error is failure else failure)

    @router.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await run(request, "completions", completion_job)

    @router.post("/v1/chat/completions")
    async def chat_complete(request: Request) -> Response:
        return await run(request, "chat", chat_job)


def check_model(model: ServedModel, name: str | None) -> None:
    """Check `name`, the model name of a request, which may be absent (None). Raises `ApiError` (404) for a name that is not
    served."""
    if name is not None and name not in model.names:
        raise unknown_model(name, model.names)


def _origin(request: Request) -> Origin:
    """Returns the origin of a request. Its engine id has a random suffix, since two callers may use the same ``x-request-id``
    at once."""
    return Origin(f"{request.state.request_id}-{secrets.token_hex(4)}", timeout_of(request.headers))
