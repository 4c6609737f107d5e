"""The health of a running endpoint, as it reports it."""

from __future__ import annotations

import httpx

_ANSWER_S = 10.0


def health_line(url: str) -> tuple[bool, str]:
    """Returns whether the endpoint at `url` accepts requests, and the reason if it does not or if something is limited (else
    empty).

    Waits for the answer, up to 10 s. Without a valid answer it returns (True, "").
    """
    try:
        health = httpx.get(f"{url}/health", timeout=_ANSWER_S).json()
        return health["status"] != "unhealthy", str(health["reason"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return True, ""
