"""Deployment of the application on a connected cluster: the request to Ray Serve, the progress, and the wait until it runs."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from placement.model.errors import ErrorReport
from serve_app.deployment.deployment_names import APP_NAME
from serve_app.deployment.settings import ServeArgs
from serve_app.deployment.start_errors import foreign_reason, text_of

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

_POLL_S = 0.1
_DEPLOY_TIMEOUT_S = 900.0
_SILENT_S = 60.0
"""Seconds without a status after which the controller counts as lost. A restarted controller is back earlier."""

_ALIVE = ("DEPLOYING", "RUNNING", "UNHEALTHY")


@dataclass(frozen=True)
class Deployed:
    """A deployed application. `port`: that of the Serve instance, which may have run before; `since`: the time of the
    deployment in seconds since 1970, None if it is not known."""

    port: int
    since: float | None


class StartFailed(SystemExit):
    """The service did not start. The reason has been written to stderr."""

    def __init__(self, reason: str) -> None:
        print(f"error: {reason}", file=sys.stderr)
        super().__init__(2)


def check_free(replace: bool) -> None:
    """Return if no application of another command runs on the connected cluster, or if `replace` permits to take its place;
    else exit with 2.

    Raises a Ray error if Serve's controller does not answer, in which case the state is unknown.
    """
    from cluster.replica.status import serve_details

    found = _application(serve_details())
    if found is not None and found["status"] in _ALIVE and not replace:
        ago_s = max(0.0, time.time() - found["last_deployed_time_s"])
        raise StartFailed(
            f"an application {APP_NAME} is {found['status'].value} on this cluster already, deployed {ago_s:.0f} s ago: end "
            "the command that serves it, or give --replace to take its place"
        )


def deploy(args: ServeArgs, host: str, port: int, stop: threading.Event) -> Deployed:
    """Deploy the service on the connected cluster and wait until it runs or `stop` is set. Replaces an application of the same
    name.

    `host` and `port` are those for HTTP; if Serve runs already, it keeps its own, and the returned port is that one. Shows the
    progress on stderr. Exits with 2 and the reason if the service fails to start or is not ready in 15 minutes. Raises
    `ModelError`, `LayoutError` or `PlacementError` for an impossible request, or a Ray error.
    """
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.api import RunTarget
    from ray.serve.schema import LoggingConfig

    from cluster.replica import failures
    from cluster.replica.status import serve_details
    from serve_app.app import application

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the import has set it to INFO
    app = application(args)  # refuse an impossible request before Serve is started, since Serve then stays on the cluster
    _start_serve(host, port)
    failures.delete_errors(APP_NAME)
    target = RunTarget(target=app, name=APP_NAME, route_prefix="/", logging_config=LoggingConfig(log_level="WARNING"))
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    with _progress() as show:
        _wait_until_running(stop, show)
    details: dict[str, Any] = {}
    with suppress(RayError):  # a controller that is too busy to answer is no reason to fail
        details = serve_details()
    return Deployed(port=_port(details, port), since=_since(_application(details)))


def _start_serve(host: str, port: int) -> None:
    """Start Ray Serve on the connected cluster, unless it runs.

    Serve waits 60 s for its HTTP proxy, which is too short on a busy machine. The second call finds Serve's controller and does
    not wait; whether the proxy works is then seen from the application.
    """
    from ray import serve
    from ray.serve.schema import LoggingConfig

    for may_be_late in (True, False):
        try:
            serve.start(
                http_options={"host": host, "port": port},
                proxy_location="HeadOnly",
                logging_config=LoggingConfig(log_level="WARNING"),
            )
            return
        except TimeoutError as error:
            if not may_be_late:
                raise
            print(f"Ray Serve did not start in time ({error}); waiting once more.", file=sys.stderr, flush=True)


def is_still(since: float | None) -> bool:
    """Returns whether the application on the connected cluster is still the one deployed at `since`, in seconds since 1970 as
    in `Deployed`; True if `since` is None, that is, not known.

    Raises a Ray error if Serve's controller does not answer.
    """
    from cluster.replica.status import serve_details

    return since is None or _since(_application(serve_details())) == since


def _application(details: dict[str, Any]) -> dict[str, Any] | None:
    found: dict[str, Any] | None = details.get("applications", {}).get(APP_NAME)
    return found


def _since(application: dict[str, Any] | None) -> float | None:
    return None if application is None else float(application["last_deployed_time_s"])


def _port(details: dict[str, Any], asked: int) -> int:
    found: int = (details.get("http_options") or {}).get("port", asked)
    if found != asked:
        print(f"Ray Serve already runs on this cluster, on port {found}; --port has no effect.", file=sys.stderr)
    return found


def _wait_until_running(stop: threading.Event, show: Callable[[], None]) -> None:
    """Wait until the application runs or `stop` is set. Exits with 2 and the reason if it fails."""
    began = answered_s = time.monotonic()
    last: ApplicationStatusOverview | None = None
    while not stop.wait(_POLL_S):
        now, status = time.monotonic(), _status()
        if status is not None:
            if status.status == "RUNNING":
                return
            answered_s, last = now, status
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise StartFailed(_reason(status))
        show()
        if now - answered_s > _SILENT_S:
            raise StartFailed(f"Ray Serve has not reported the state of the application for {_SILENT_S:.0f} s")
        if now - began > _DEPLOY_TIMEOUT_S:
            raise StartFailed(f"not ready after {_DEPLOY_TIMEOUT_S:.0f} s: {_reason(last)}")


def _reason(status: ApplicationStatusOverview | None) -> str:
    """Returns the reason why the application does not run: the error report of one of its deployments, or else Serve's
    message."""
    deployments = {} if status is None else status.deployments
    report = next((found for name in deployments if (found := _report(name)) is not None), None)
    if report is not None:
        return text_of(report)
    return foreign_reason([] if status is None else [status.message, *(each.message for each in deployments.values())])


def _report(deployment: str) -> ErrorReport | None:
    """Returns the error report of this deployment's constructor; None if there is none or the cluster does not answer."""
    from ray.exceptions import RayError

    from cluster.replica import failures

    with suppress(RayError):
        return failures.stored_error(APP_NAME, deployment)
    return None


def _status() -> ApplicationStatusOverview | None:
    """Returns the application's status; None while Serve's controller restarts and does not answer or does not know the
    application yet."""
    from ray import serve
    from ray.exceptions import RayActorError

    with suppress(RayActorError):
        return serve.status().applications.get(APP_NAME)
    return None


@contextmanager
def _progress() -> Iterator[Callable[[], None]]:
    """Yields a function that draws the loading progress of each rank (found by its actor name) and prints what the replicas
    wait for."""
    from ray.exceptions import RayError

    from actors.wire.rank_config import RankStatus
    from cluster.replica.launch import rank_statuses
    from cluster.replica.placement_wait import wait_messages

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, TaskID] = {}
        statuses: dict[str, RankStatus] = {}
        shown: set[str] = set()
        with suppress(RayError):  # messages that earlier replicas have left
            shown.update(wait_messages())

        def show() -> None:
            lines: list[str] = []
            with suppress(RayError):  # a cluster that is too busy to answer is no reason to fail
                statuses.update(rank_statuses())
                lines = [line for line in wait_messages() if line not in shown]
            shown.update(lines)
            for line in lines:
                progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            for name, status in statuses.items():
                if name not in tasks:
                    tasks[name] = progress.add_task(name, total=None)
                progress.update(
                    tasks[name],
                    description=f"rank {name.rsplit('-', 1)[-1]} {status.state}",
                    completed=status.loaded_bytes,
                    total=status.total_bytes or None,
                )

        yield show
