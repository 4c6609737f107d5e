"""Finds the Shardwright applications of a cluster, which `render --name` and Kubernetes overlays may have given other names
than `serve` does."""

from __future__ import annotations

import sys
from typing import Any

from serve_app.deployment.deployment_names import APP_NAME, IMPORT_PATH, INGRESS, POOL_OF


class ApplicationError(ValueError):
    """Several applications match. ``str()`` is the complete message."""


def application_name(details: dict[str, Any], asked: str | None) -> str:
    """Returns the name of the application to use, from Serve's details (``ServeInstanceDetails`` as plain values).

    It is `asked`, the name that the user gave, even if it does not exist; if that is None, ``shardwright`` if it exists, else
    the only Shardwright application, else ``shardwright``. Raises `ApplicationError` if there are several.
    """
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
    """Returns the same name as `application_name`, for a command: prints the reason and exits with 2 if there are several
    applications."""
    try:
        return application_name(details, asked)
    except ApplicationError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def applications(details: dict[str, Any]) -> list[str]:
    """Returns the sorted names of the Shardwright applications in Serve's `details` (``ServeInstanceDetails`` as plain values),
    recognised by their import path or, if Serve does not report it, by their deployments."""
    return sorted(name for name, found in details.get("applications", {}).items() if _is_ours(found))


def _is_ours(found: dict[str, Any]) -> bool:
    built_from = (found.get("deployed_app_config") or {}).get("import_path")  # `serve run` has none
    deployments = found.get("deployments", {}).keys()
    return built_from == IMPORT_PATH or (INGRESS in deployments and not deployments.isdisjoint(POOL_OF))
