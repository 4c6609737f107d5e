"""The operator's settings of the endpoint."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ApiSettings(BaseModel):
    """Limits and keys of the endpoint. With `api_keys`, ``/v1/…`` and the token routes need one of them as a bearer token."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the endpoint (CORS); ``*`` for all. None by default."""
    sse_ping_s: float = 15.0
    """Seconds of silence after which a stream gets a comment line; 0: never."""
    max_body_bytes: int = 32 * 2**20
    max_choices: int = 256
    """Maximum number of prompts times ``n`` in one request."""
    max_logprobs: int = 20
    """Maximum number of alternatives per token that a caller may request."""
    request_id_on_answers: bool = True
    """Whether the endpoint puts ``x-request-id`` on answers; False if a proxy in front does so."""
    retry_after_s: float = 1.0
    """Value of ``retry-after`` in seconds for temporary refusals, if the backend names no time."""
