"""Errors of the endpoint, all in one shape: ``{"error": {"message", "type", "param", "code"}}``.

`param` is always the name of a field, never the value that the caller gave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from serve_app.routing.backend import BackendRefused

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer other than 200. Its `headers` are sent with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """The error type in OpenAI's terms, such as ``invalid_request_error``, which follows from the status."""
        if self.code == "model_not_found":
            return "invalid_request_error"
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """Returns the JSON object of the answer: ``{"error": {"message", "type", "param", "code"}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def invalid(param: str, message: str, code: str | None = "invalid_value") -> ApiError:
    """Returns an error (400) for a request field with an unusable value. `param` is the name of the field, `message` what is
    wrong with it, and `code` OpenAI's error code."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def unsupported(param: str, instead: str) -> ApiError:
    """Returns an error (400) for the field `param`, which this server knows but does not support. `instead` is the text about
    the alternative."""
    return ApiError(400, f"{param} is not supported: {instead}", param=param, code="unsupported_parameter")


def too_long(param: str, limit: int, prompt_tokens: int, requested: int | None) -> ApiError:
    """Returns an error (400) for a prompt that leaves no room to generate.

    `param` is the field of the prompt, `limit` the model's context length, `prompt_tokens` the prompt's length, and `requested`
    the number of tokens to generate (None: not given), all in tokens.
    """
    asked = "the default number of" if requested is None else str(requested)
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens: the prompt has {prompt_tokens} tokens "
        f"and {asked} were asked for. A prompt may have at most {limit - 1} tokens.",
        param=param,
        code="context_length_exceeded",
    )


def from_validation(error: ValidationError) -> ApiError:
    """Returns an error (400) whose message lists all fields that pydantic rejected; its `param` is the first of them."""
    found = [(str(item["loc"][0]) if item["loc"] else "body", item["msg"]) for item in error.errors(include_input=False)]
    message = "; ".join(dict.fromkeys(f"{field}: {text}" for field, text in found))
    return ApiError(400, message, param=found[0][0], code="invalid_value")


def from_refusal(refusal: BackendRefused, retry_after_s: float) -> ApiError:
    """Returns the error that tells the caller why the backend refused the request: 400 for a prompt that is too long, 429 if
    the engine is busy, else 503.

    429 and 503 have a header ``retry-after`` with the refusal's time, or else `retry_after_s`, in seconds, rounded up.
    """
    if refusal.code == "prompt_too_long":
        return ApiError(400, refusal.message, param="prompt", code="context_length_exceeded")
    retry = math.ceil(refusal.retry_after_s if refusal.retry_after_s is not None else retry_after_s)
    status = 429 if refusal.code == "engine_busy" else 503
    return ApiError(status, refusal.message, code=refusal.code, headers={"retry-after": str(max(1, retry))})


def unknown_model(name: str, names: Sequence[str]) -> ApiError:
    """Returns an error (404) for a request of a model that is not served here. The message lists the served `names`, but not
    `name`, the one that the caller gave."""
    return ApiError(
        404, f"The model asked for is not served here; {', '.join(names)} is.", param="model", code="model_not_found"
    )
