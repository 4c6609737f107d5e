"""The OpenAI-compatible endpoint as a FastAPI application.

POST /v1/completions  /v1/chat/completions  /tokenize  /detokenize
GET  /v1/models  /v1/models/{id}  /health  /metrics  /version
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from serve_app.deployment.served_model import ServedModel
from serve_app.openai.cors import add_cors
from serve_app.openai.request.errors import ApiError
from serve_app.openai.request.keys import key_check
from serve_app.openai.request.request_id import RequestId
from serve_app.openai.request.settings import ApiSettings
from serve_app.openai.response.encoding import json_response
from serve_app.openai.response.metrics import Metrics
from serve_app.openai.routes_generate import add_generation
from serve_app.openai.routes_model import add_models, add_tokens
from serve_app.openai.routes_status import add_status
from serve_app.routing.backend import Backend

__all__ = ["ApiSettings", "create_api"]


def create_api(model: ServedModel, backend: Backend, settings: ApiSettings | None = None) -> FastAPI:
    """Returns the FastAPI application of the endpoint, which serves `model` with the tokens that `backend` generates.
    `settings`: limits and keys; None: the defaults. Its only state is its metrics."""
    settings, metrics = settings or ApiSettings(), Metrics()
    app = FastAPI(title="Shardwright", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    if settings.allow_origins:
        add_cors(app, settings.allow_origins)
    app.add_middleware(RequestId, on_answers=settings.request_id_on_answers)
    app.add_exception_handler(ApiError, _error_response)
    app.add_exception_handler(HTTPException, _error_response)
    keyed, free = APIRouter(dependencies=[Depends(key_check(settings.api_keys))]), APIRouter()
    add_generation(keyed, model, backend, settings, metrics)
    add_models(keyed, model)
    add_tokens(keyed, model, settings)
    add_status(free, backend, metrics)
    app.include_router(keyed)
    app.include_router(free)
    return app


async def _error_response(_: Request, error: Exception) -> Response:
    """Returns an `ApiError`, or an error of the framework itself (unknown path, wrong method), in the common error shape."""
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        text = {404: "There is nothing at this path.", 405: f"This path wants {headers.get('Allow', 'another method')}."}
        error = ApiError(error.status_code, text.get(error.status_code, str(error.detail)), headers=headers)
    assert isinstance(error, ApiError)
    return json_response(error.body(), error.status, error.headers)
