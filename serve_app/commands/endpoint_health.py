"""Calls of the commands to an endpoint: how to reach it, and its health as it reports it."""

from __future__ import annotations

import ipaddress

import httpx

_ANSWER_S = 10.0


def uses_proxy(url: str) -> bool:
    """Returns whether calls to `url` go through the proxy that the environment names (``http_proxy``), if it names one. Those
    to this machine and to private addresses, where nodes of a cluster are, never do."""
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return host != "localhost" and not host.endswith(".localhost")


def health_line(url: str) -> tuple[bool, str]:
    """Returns whether the endpoint at `url`, on this cluster, accepts requests, and the reason if it does not or if something
    is limited (else empty).

    Waits for the answer, up to 10 s, and never asks through a proxy. Without a valid answer the endpoint counts as not ready.
    """
    try:
        with httpx.Client(timeout=_ANSWER_S, trust_env=False) as client:
            answer = client.get(f"{url}/health")
    except httpx.HTTPError as error:
        return False, f"/health does not answer: {error or type(error).__name__}"
    try:
        health = answer.json()
        return health["status"] != "unhealthy", str(health["reason"])
    except (ValueError, KeyError, TypeError):
        return False, f"/health answers with status {answer.status_code} and no health"
