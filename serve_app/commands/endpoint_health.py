"""What a running endpoint says of its own health."""

from __future__ import annotations

import httpx

_ANSWER_S = 10.0


def health_line(url: str) -> tuple[bool, str]:
    """Whether it takes requests, and what is amiss, if anything. Of one that does not say nothing is."""
    try:
        health = httpx.get(f"{url}/health", timeout=_ANSWER_S).json()
        return health["status"] != "unhealthy", str(health["reason"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return True, ""
