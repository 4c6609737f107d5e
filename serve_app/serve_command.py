"""``shardwright serve``: start or join Ray, deploy, show progress, say when it is ready, and end what was started."""

from __future__ import annotations

import errno
import io
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cluster import local
from cluster.settings import ReplicaSettings
from placement.layout import Layout
from placement.model_spec import ModelError
from serve_app.catalog import resolve
from serve_app.settings import ServeArgs, replica_settings
from serve_app.text.model_files import read_text_files
from serve_app.text.template import TemplateError
from serve_app.text.tokenizer import TokenizerError

_POLL_S = 0.1
_DEPLOY_TIMEOUT_S = 900.0
_INTERRUPTED = 130
"""Exit status of a server that was told to end before it was ready, or twice."""


class StartFailed(SystemExit):
    """The service did not come up; the reason is already on stderr."""

    def __init__(self, reason: str) -> None:
        print(f"error: {reason}", file=sys.stderr)
        super().__init__(2)


def run_server(args: ServeArgs, *, host: str, port: int, address: str | None, json_logs: bool) -> None:
    """Serve until interrupted. Mistakes are found before anything starts, where they can be.

    Raises `ModelError`, `LayoutError`, or exits with 2 after one message, or 130 when interrupted before it was ready.
    """
    _set_logs(json_logs)
    settings = _preflight(args, address)
    port = _free_port(host, port)
    stop = threading.Event()
    _end_on_interrupts(stop)
    try:
        cluster = local.connect(address, slots=settings.layout.devices)
    except ConnectionError as error:
        raise StartFailed(f"no Ray cluster answers at {address or local.configured_address()}: {error}") from error
    _end_on_interrupts(stop)  # starting Ray has put its own answer to SIGTERM in place: to abort
    try:
        if not stop.is_set():
            _deploy(args, host, port, stop)
        if stop.is_set():
            raise SystemExit(_INTERRUPTED)
        _ready(args, settings.layout, host, port, cluster.address)
        stop.wait()
    finally:
        _end(cluster)


def _preflight(args: ServeArgs, address: str | None) -> ReplicaSettings:
    """Find mistakes before anything starts; the cluster's own limits are known only here, when this machine is it."""
    alone = address is None and not local.configured_address() and args.device != "cuda"
    here = local.this_machine(Layout.parse(args.layout).devices) if alone else None
    settings = replica_settings(args, "cuda" if args.device == "cuda" else "cpu", here)
    try:
        read_text_files(resolve(args.model).path)
    except (TokenizerError, TemplateError) as error:
        raise ModelError(str(error)) from error
    return settings


def _deploy(args: ServeArgs, host: str, port: int, stop: threading.Event) -> None:
    from ray import serve
    from ray.serve.api import RunTarget
    from ray.serve.schema import LoggingConfig

    from serve_app.app import APP_NAME, build

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # importing it has set it to INFO
    serve.start(
        http_options={"host": host, "port": port}, proxy_location="HeadOnly", logging_config=LoggingConfig(log_level="WARNING")
    )
    target = RunTarget(target=build(args), name=APP_NAME, route_prefix="/", logging_config=LoggingConfig(log_level="WARNING"))
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    deadline = time.monotonic() + _DEPLOY_TIMEOUT_S
    with _progress() as show:
        while not stop.wait(_POLL_S):
            status = serve.status().applications[APP_NAME]
            show()
            if status.status == "RUNNING":
                return
            reasons = [status.message, *(each.message for each in status.deployments.values())]
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise StartFailed(_first_reason(reasons))
            if time.monotonic() > deadline:
                raise StartFailed(f"not ready after {_DEPLOY_TIMEOUT_S:.0f} s: {_first_reason(reasons)}")


@contextmanager
def _progress() -> Iterator[Callable[[], None]]:
    """A function that draws how far each rank's loading is; rank actors are found by name."""
    from cluster.launch import rank_statuses

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def show() -> None:
            for name, status in rank_statuses().items():
                if name not in tasks:
                    tasks[name] = progress.add_task(name, total=None)
                progress.update(
                    tasks[name],
                    description=f"rank {name.rsplit('-', 1)[-1]} {status.state}",
                    completed=status.loaded_bytes,
                    total=status.total_bytes or None,
                )

        yield show


def _first_reason(messages: list[str]) -> str:
    """The line a person needs out of Serve's traceback: the last exception text of the first message that has one."""
    for message in messages:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        for line in reversed(lines):
            for marker in ("LaunchError: ", "SeatError: ", "ModelError: ", "LayoutError: "):
                if marker in line:
                    return line.split(marker, 1)[1]
    return next((message for message in messages if message), "Ray Serve gave no reason")


def _ready(args: ServeArgs, layout: Layout, host: str, port: int, address: str) -> None:
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"messages": [question], "max_tokens": 64, "temperature": 0, "stream": True})
    print(f"\nShardwright is ready: {args.model} as {layout} on {url} (Ray at {address}). Ctrl-C ends it.\n")
    print(f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\\n    -d '{body}'\n", flush=True)


def _end(cluster: local.Connection) -> None:
    """Take back what was started: the application, and Ray where it is embedded."""
    import ray
    from ray import serve

    from serve_app.app import APP_NAME

    # Ray reports the end of its own actors as errors, on either stream.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            if cluster.embedded:
                serve.shutdown()
            else:
                serve.delete(APP_NAME)
        finally:
            ray.shutdown()


def _free_port(host: str, port: int) -> int:
    """`port` when it can be bound (for 0, one the kernel chose). Exits with 2 when it is busy or not ours to bind."""
    try:
        with socket.create_server((host, port)) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        why = "already in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise StartFailed(f"port {port} on {host}: {why}; choose another with --port") from error


def _end_on_interrupts(stop: threading.Event) -> None:
    """Ctrl-C or a termination signal sets `stop`. A second one ends the process at once."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise SystemExit(_INTERRUPTED)
        stop.set()

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)


def _set_logs(json_logs: bool) -> None:
    plain = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    structured = '{"time": "%(asctime)s", "level": "%(levelname)s", "logger": "%(name)s", "message": "%(message)s"}'
    logging.basicConfig(level=logging.WARNING, format=structured if json_logs else plain)
