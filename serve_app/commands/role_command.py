"""``shardwright role``: change the role of a running replica, and show the work that must finish first."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from actors.wire.roles import Role
from cluster.replica.roles import RoleReport, counted
from serve_app.commands.connection import connected
from serve_app.deployment.applications import chosen

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_LOOK_EVERY_S = 0.5
_ANSWER_S, _POLL_S = 20.0, 5.0


def run_role(replica: str, becomes: str, within_s: float, address: str | None, as_json: bool, name: str | None = None) -> None:
    """Change the role of `replica` (its name) to `becomes` on the cluster at `address` (None: the one that is found), and wait
    until it has changed.

    The change is given up after `within_s` seconds. `name` is the application; None: see `serve_app.deployment.applications`.
    `as_json` prints the report as JSON. Exits with 1 if the role does not change, and with 2 if `becomes` is no role, no
    cluster answers, or several applications match. Raises `TimeoutError` if the HTTP process does not answer in 20 s.
    """
    if becomes not in list(Role):
        print(f"error: {becomes!r} is not a role; the roles are {', '.join(Role)}", file=sys.stderr)
        raise SystemExit(2)
    with connected(address):
        from cluster.replica.status import serve_details

        report = _changed(chosen(serve_details(), name), replica, becomes, within_s, quiet=as_json)
    if isinstance(report, RoleReport):
        typer.echo(report.model_dump_json() if as_json else f"replica {report.name} is {report.role}")
    if not isinstance(report, RoleReport) or report.role != becomes:
        print(f"error: {report.gave_up if isinstance(report, RoleReport) else report}", file=sys.stderr)
        raise SystemExit(1)


def _changed(name: str, replica: str, becomes: str, within_s: float, quiet: bool) -> RoleReport | str:
    """Returns the final state of the replica, or the reason why it does not exist or may not change."""
    from ray.serve.exceptions import RayServeException

    try:
        ingress = _ingress(name)
    except RayServeException as error:
        return f"no application runs on this cluster: {error}"
    report: RoleReport | str = _call(ingress, "change_role", replica, becomes, within_s)
    ends, shown = time.monotonic() + within_s + _ANSWER_S, ""
    while isinstance(report, RoleReport) and report.becomes is not None and time.monotonic() < ends:
        waits = (
            f"replica {report.name} finishes {counted(report.waits_for)}, "
            f"and takes no more such; {report.left_s:.0f} s are left"
        )
        if not quiet and counted(report.waits_for) != shown:
            shown = counted(report.waits_for)
            print(waits, file=sys.stderr)
        time.sleep(_LOOK_EVERY_S)
        report = next((each for each in _call(ingress, "roles") if each.name == replica), f"replica {replica} is gone")
    return report


def role_reports(name: str) -> list[RoleReport]:
    """Returns the role report of each replica in the pools of the application `name` on the connected cluster; an empty list if
    there are no pools, or if the roles are not available in 5 s."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        found: list[RoleReport] = _call(_ingress(name), "roles", timeout_s=_POLL_S)
    except (RayError, RayServeException, TimeoutError):  # status must also work when something is wrong
        return []
    return found


def _ingress(name: str) -> DeploymentHandle[Any]:
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the import has set it to INFO
    return serve.get_app_handle(name)


def _call(ingress: DeploymentHandle[Any], method: str, *arguments: object, timeout_s: float = _ANSWER_S) -> Any:
    call: Any = ingress.options(method_name=method)
    return call.remote(*arguments).result(timeout_s=timeout_s)
