"""Which application of a cluster is ours: `render --name` and the overlays call it other than `serve` does."""

from __future__ import annotations

import sys
from typing import Any

from serve_app.deployment.deployment_names import APP_NAME, IMPORT_PATH, INGRESS, POOL_OF


class ApplicationError(ValueError):
    """Several applications could be meant. ``str()`` is the whole message."""


def application_name(details: dict[str, Any], asked: str | None) -> str:
    """The application that is meant, of Serve's details (``ServeInstanceDetails``): the one `asked` for, else ``shardwright``,
    else the only one of ours; ``shardwright`` where there is none. Raises `ApplicationError` where there are several."""
    if asked is not None:
        return asked
    ours = applications(details)
    if APP_NAME in ours or not ours:
        return APP_NAME
    if len(ours) > 1:
        raise ApplicationError(
            f"this cluster has {len(ours)} applications, {', '.join(ours)}: say which, as in --name {ours[0]}"
        )
    return ours[0]


def chosen(details: dict[str, Any], asked: str | None) -> str:
    """The same for a command: exits with 2, and the reason, where there are several."""
    try:
        return application_name(details, asked)
    except ApplicationError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def applications(details: dict[str, Any]) -> list[str]:
    """Names of those that are ours, by what they were built from or, where nobody says that, by their deployments."""
    return sorted(name for name, found in details.get("applications", {}).items() if _is_ours(found))


def _is_ours(found: dict[str, Any]) -> bool:
    built_from = (found.get("deployed_app_config") or {}).get("import_path")  # `serve run` has none
    deployments = found.get("deployments", {}).keys()
    return built_from == IMPORT_PATH or (INGRESS in deployments and not deployments.isdisjoint(POOL_OF))
