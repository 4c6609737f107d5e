"""``shardwright serve``: start or join Ray, deploy (`deploy.py`), report readiness, and at the end stop what was started."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from actors.kv_offload.key_layout import DirectoryError, own_folder
from cluster.embedded import local
from cluster.embedded.processes import end_descendants
from cluster.embedded.watch import ClusterWatch
from placement.cost.kv_budget import usual_length
from placement.cost.memory import MemoryBudgetError
from placement.layout.layout import LayoutError
from serve_app.commands.deploy import StartFailed, check_free, deploy, is_still
from serve_app.commands.endpoint_health import health_line
from serve_app.deployment import pools
from serve_app.deployment.deployment_names import APP_NAME
from serve_app.deployment.pools import Service
from serve_app.deployment.preflight import check_files
from serve_app.deployment.settings import ServeArgs
from serve_app.deployment.start_errors import error_text
from serve_app.openai import proxy
from serve_app.text.model_files import TextFiles

_END_S = 45.0
_INTERRUPTED = 130
"""Exit status of a server that was interrupted before it was ready, or interrupted twice."""


def run_server(
    args: ServeArgs,
    *,
    host: str,
    port: int,
    address: str | None,
    json_logs: bool,
    shape: local.EmbeddedShape | None = None,
    replace: bool = False,
) -> None:
    """Serve until interrupted (Ctrl-C or SIGTERM). Errors are found before anything starts, as far as possible.

    `host` and `port` are those for HTTP (0: any free port), `address` is the Ray cluster to join (None: ``RAY_ADDRESS``, else
    an embedded one), and `json_logs` writes log lines as JSON. `shape`: the Ray nodes to embed. `replace`: take the place of an
    application that already runs on the cluster.

    Raises `ModelError` or `LayoutError` for an impossible request; exits with 2 after one message for other errors, or with 130
    if interrupted before the service was ready. If the cluster is lost, the process ends with 2.
    """
    _set_logs(json_logs)
    served, texts = _preflight(args, address, shape)
    joins = shape is None and (address or local.configured_address()) is not None
    if not joins:  # on other machines, the replicas check it when they start
        _check_directory(served)
    if not joins or port == 0:  # on an existing cluster, the port may belong to its Serve, which accepts the application
        port = _free_port(host, port)
    stop = threading.Event()
    _end_on_interrupts(stop)
    with _errors_as_exit(stop):
        cluster = _connect(address, served.devices, shape)
    _end_on_interrupts(stop)  # Ray has installed its own SIGTERM handler, which aborts
    watch = ClusterWatch(cluster, _cluster_lost)
    is_ours, since = False, None
    try:
        if not stop.is_set():
            with _errors_as_exit(stop, watch.check):
                check_free(replace)
                is_ours = True
                deployed = deploy(args, host, port, stop)
                port, since = deployed.port, deployed.since
        if stop.is_set():
            raise SystemExit(_INTERRUPTED)
        _ready(args, served, f"http://{_reachable(host)}:{port}", cluster.address, texts)
        stop.wait()
    finally:
        watch.close()
        _end(cluster, is_ours, since)


def _connect(address: str | None, slots: int, shape: local.EmbeddedShape | None) -> local.Connection:
    try:
        return local.connect(address, slots=slots, environment=proxy.SETTING, shape=shape)
    except (ConnectionError, ValueError) as error:  # ValueError: not an address
        where = address or local.configured_address() or "this machine, where it was started"
        raise StartFailed(f"no Ray cluster answers at {where}: {error}") from error


@contextmanager
def _errors_as_exit(stop: threading.Event, check_cluster: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turn every error of Ray or Serve into one message and exit status 2.

    If `stop` is set, the exit is attributed to the interrupt. `check_cluster` does not return if the cluster is lost, in which
    case that is the reported reason.
    """
    try:
        yield
    except Exception as error:
        if stop.is_set():
            raise SystemExit(_INTERRUPTED) from error
        check_cluster()
        raise StartFailed(error_text(error)) from error


def _preflight(args: ServeArgs, address: str | None, shape: local.EmbeddedShape | None) -> tuple[Service, TextFiles]:
    """Find errors before anything starts. The cluster's own limits are only known here if the cluster is this machine."""
    if shape is not None and (address is not None or args.device == "cuda"):
        with_ = "--address" if address is not None else "--device cuda"
        raise LayoutError(f"--nodes embeds CPU nodes on this machine and cannot be combined with {with_}: give one of them")
    alone = shape is not None or (address is None and not local.configured_address() and args.device != "cuda")
    here = local.this_machine(pools.slots_for(args), shape) if alone else None
    try:
        served = pools.service(args, "cuda" if args.device == "cuda" else "cpu", here)
    except MemoryBudgetError as error:
        raise MemoryBudgetError(f"{error}. {local.memory_text(shape)}" if alone else str(error)) from error
    if served.in_pools and alone:
        pools.check_nixl()
    return served, check_files(Path(served.engine.model_path), served.engine.spec)


def _check_directory(served: Service) -> None:
    """Create the directory for KV blocks. Exits with 2 if this machine cannot."""
    directory = served.engine.disk_cache
    try:
        if directory is not None:
            own_folder(directory)
    except DirectoryError as error:
        raise StartFailed(str(error)) from error


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _ready(args: ServeArgs, served: Service, url: str, address: str, texts: TextFiles) -> None:
    from ray.exceptions import RayError

    from cluster.replica.status import replica_ids, serve_details, slow_crossings

    settings = served.engine
    slow: list[str] = []
    with suppress(RayError):  # a cluster that is too busy to answer is no reason to fail
        details = serve_details()
        pools = {name: replica_ids(details, APP_NAME, name) for name in served.by_name}
        slow = [line for name, each in served.by_name.items() for line in slow_crossings(each, pools[name])]
    is_ready, amiss = health_line(url) if served.in_pools else (True, "")
    how = "is ready" if is_ready else "runs, but is not ready"
    print(f"\nShardwright {how}: {args.model} as {served} on {url} (Ray at {address}). Ctrl-C ends it.\n")
    print(f"  {amiss}\n" if amiss else "", end="")
    if settings.max_model_len < usual_length(settings.spec.max_position, args.max_model_len):
        print(f"  Sequences end at {settings.max_model_len:,} tokens: more do not fit the KV cache (--kv-bytes).\n")
    path, body = _example(texts)
    print("".join(f"  {line}\n" for line in slow), end="\n" if slow else "")
    print(f"  curl -N {url}{path} -H 'content-type: application/json' \\\n    -d '{json.dumps(body)}'\n", flush=True)


def _example(texts: TextFiles) -> tuple[str, dict[str, object]]:
    """Returns the path and body of an example request of a kind that the model can answer."""
    options: dict[str, object] = {"max_tokens": 64, "temperature": 0, "stream": True}
    if texts.template is not None:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "What is the capital of France?"}], **options}
    return "/v1/completions", {"prompt": [1, 2, 3] if texts.tokenizer is None else "The capital of France is", **options}


def _end(cluster: local.Connection, is_ours: bool, since: float | None) -> None:
    """Remove what was started: the application, and Ray if it is embedded. Prints what could not be removed.

    `is_ours`: whether this command has deployed an application; `since`: the time of its deployment, if known. An application
    that another command deployed stays.
    """
    from ray import serve
    from ray.serve.exceptions import RayServeException

    if cluster.embedded:
        _end_by_force_after(_END_S)
    # Ray reports the end of its own actors as errors, on stdout or stderr.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    left = None
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            if cluster.embedded:
                serve.shutdown()
            elif is_ours and is_still(since):
                serve.delete(APP_NAME)
        except Exception as error:
            # The application ends with an embedded Ray, and without Serve there is no application.
            left = None if cluster.embedded or isinstance(error, RayServeException) else error_text(error)
        finally:
            local.disconnect(cluster)
    if left is not None:
        print(f"error: the application {APP_NAME} may still be on the cluster at {cluster.address}: {left}", file=sys.stderr)


def _cluster_lost(reason: str) -> NoReturn:
    """End this process and all its child processes, without a call to the cluster. May be called from any thread."""
    Console(stderr=True).show_cursor()  # a progress bar may have hidden it
    print(f"error: {reason}; the service has ended", file=sys.stderr, flush=True)
    end_descendants()
    os._exit(2)


def _end_by_force_after(seconds: float) -> None:
    """Kill this process if it has not ended after `seconds`: Ray waits without a limit for those of its parts that no longer
    answer."""

    def end() -> None:
        text = f"error: the embedded Ray cluster did not end within {seconds:g} s; its processes were killed"
        print(text, file=sys.__stderr__, flush=True)
        end_descendants()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _free_port(host: str, port: int) -> int:
    """Returns `port` if it can be bound (for 0, a port that the kernel chose). Exits with 2 if it is in use or may not be
    bound."""
    try:
        with socket.create_server((host, port)) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        why = "already in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise StartFailed(f"port {port} on {host}: {why}; choose another with --port") from error


def _end_on_interrupts(stop: threading.Event) -> None:
    """Install signal handlers: Ctrl-C or a termination signal sets `stop`; a second one ends the process at once."""

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
