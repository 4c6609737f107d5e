"""What the operator decides about the endpoint."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ApiSettings(BaseModel):
    """Limits and keys of the endpoint. With `api_keys`, ``/v1/…`` and the token routes want one as Bearer token."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    max_choices: int = 256
    """Prompts times ``n`` of one request."""
    max_logprobs: int = 20
    """Most alternatives a caller may ask for per token."""
    request_id_on_answers: bool = True
    """Not where a proxy in front puts ``x-request-id`` on them."""
    retry_after_s: float = 1.0
    """Told to callers who are refused for now, where the backend names no time."""
