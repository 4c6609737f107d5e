"""Authentication by bearer keys."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request

from serve_app.openai.request.errors import ApiError


def key_check(keys: Sequence[str]) -> Callable[[Request], Awaitable[None]]:
    """Returns an async function that checks the header ``authorization`` of a request: it raises `ApiError` (401) unless the
    header carries one of `keys` as a bearer token. Without `keys`, all requests pass."""
    wanted = [key.encode() for key in keys]

    async def check(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        offered = given.strip().encode()
        # Every key is compared, each in constant time, so that the timing reveals nothing about them.
        matches = [hmac.compare_digest(offered, key) for key in wanted]
        if wanted and not (scheme.lower() == "bearer" and any(matches)):
            raise ApiError(
                401, "Give a valid API key as 'Authorization: Bearer KEY'.", code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )  # fmt: skip

    return check
