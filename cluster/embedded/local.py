"""Connections to Ray: join a cluster by its address, or start an embedded one inside this process.

This is the only module that sets Ray's environment variables, which must be set before `ray` is first imported.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from cluster.embedded import ray_folder, session
from cluster.embedded.second_try import started
from cluster.nodes.topology import NAME_LABEL
from placement.layout.layout import LayoutError
from placement.nodes.hardware import ClusterSpec, NodeSpec
from placement.nodes.limits import MemoryLimit, cpu_limit, memory_limit

NAMESPACE = "shardwright"

_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray runs workers at nice 15, which starves ranks on a busy machine
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

_COMMON: dict[str, Any] = {
    "namespace": NAMESPACE,
    "log_to_driver": False,
    "logging_level": logging.ERROR,
    "ignore_reinit_error": True,
}

_OBJECT_STORE_BYTES = 256 * 2**20
"""Size of the object store of an embedded node at most. No tensors pass through it, so little is needed, and less on a small
machine (`object_store_bytes`)."""
_LEAST_OBJECT_STORE_BYTES = 80 * 2**20
"""Slightly more than the least that Ray accepts."""
_SERVICE_BYTES = 1_000_000_000
"""Bytes that an embedded service takes besides its ranks: Ray's head processes, Serve's controller and proxy, the HTTP process,
one engine and this command. Measured as 845 MB when it was ready, and about 100 MB more under load."""
_NODE_BYTES = 200_000_000
"""Bytes that the Ray processes of each further embedded node take."""

_ANSWER_S = 10.0
"""Seconds after which a head that accepts no connection is taken to be absent."""


_SESSION_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", ray_folder.VARIABLE)
"""Environment variables that another process needs to join an embedded cluster."""


@dataclass(frozen=True)
class EmbeddedShape:
    """The shape of an embedded cluster: the number of nodes, and the slots of each node."""

    nodes: int
    slots: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the shape of an embedded cluster, such as ``2x4``: two nodes of four slots (room for one rank each).

        Returns the shape. Raises `LayoutError` for any other form, and for more than 99 nodes or 9999 slots.
        """
        found = re.fullmatch(r"([1-9]\d?)x([1-9]\d{0,3})", text)
        if found is None:
            raise LayoutError(f"nodes is {text!r}, but must be NODESxSLOTS, as in 2x4: two nodes of four slots")
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True)
class Connection:
    """The cluster that this process is connected to. An embedded cluster was started by this process and ends with it."""

    address: str
    embedded: bool
    head: Any = None
    """Ray's record of the processes of an embedded cluster's head node."""
    others: tuple[Any, ...] = ()
    """Ray's records of the processes of the other embedded nodes."""
    end: Callable[[], None] = field(default=lambda: None)
    """Ends those processes of an embedded cluster that leaving it does not end."""


def connect(
    address: str | None = None,
    slots: int | None = None,
    environment: Mapping[str, str] | None = None,
    shape: EmbeddedShape | None = None,
) -> Connection:
    """Join the Ray cluster at `address` (or ``RAY_ADDRESS``), or embed one in this process: if neither is given, or if `shape`
    is.

    An embedded cluster has at least `slots` CPU slots (a slot is room for one rank, not a core), or with `shape`, several nodes
    (raylets on this machine), which `address` does not affect. It requires a random token, so that no other program on the
    network can join it, and writes a session file for `connect_running`. Its files are in a folder of this user
    (`cluster.embedded.ray_folder`). `environment` contains variables for its processes: they are set in ``os.environ`` unless
    they are set already.

    Returns the connection, to be ended by `disconnect`. Raises `ConnectionError` if no cluster answers at the address,
    `ValueError` if it is not an address, `FolderError` if there is no folder for the files of an embedded cluster,
    `StartTimeout` if that does not start in time in two tries, and a Ray error if it does not start for another reason.
    """
    address = None if shape is not None else address or configured_address()
    if address is not None:
        _check_answers(address)
    for name, value in {**_DEFAULTS, **(environment or {})}.items():
        os.environ.setdefault(name, value)
    if address is not None:
        return _join(address)
    os.environ[ray_folder.VARIABLE] = ray_folder.own_folder()
    _lock_embedded()
    connection = started(lambda: _embed(slots) if shape is None else _embed_nodes(shape), leave)
    kept = {name: os.environ[name] for name in _SESSION_VARIABLES if name in os.environ}
    session.remember(session.Session(connection.address, kept))
    return connection


def connect_running(address: str | None = None) -> Connection:
    """Join the cluster at `address`, at ``RAY_ADDRESS``, or the newest one that a running command of this user embeds on this
    machine.

    In the last case, the token and the folder of that cluster are set in ``os.environ``. Returns the connection, to be ended by
    `leave`. Raises `ConnectionError` if there is no such cluster, or if it does not answer, and `ValueError` if `address` is
    not an address.
    """
    found = None if address or configured_address() else session.latest()
    if found is not None:
        os.environ.update(found.environment)
    elif not address and not configured_address():
        raise ConnectionError("no address is given, RAY_ADDRESS is not set, and no shardwright serve runs on this machine")
    return connect(found.address if found is not None else address)


def disconnect(connection: Connection) -> None:
    """Leave the cluster of `connect`, which ends it and deletes its session file if it is embedded. Errors of Ray are
    ignored."""
    import ray

    session.forget()
    with suppress(Exception):  # Ray tries again when this process ends
        ray.shutdown()
    with suppress(Exception):
        connection.end()


def leave() -> None:
    """Leave the cluster that `connect_running` has joined; the cluster keeps running. Errors of Ray are ignored."""
    import ray

    with suppress(Exception):
        ray.shutdown()


def _join(address: str) -> Connection:
    import ray

    try:
        context: Any = ray.init(address=address, **_COMMON)
    except ConnectionError as error:
        mode = os.environ.get("RAY_AUTH_MODE", "unset")
        raise ConnectionError(
            f"{error}. If a cluster does run at this address, the token may be wrong: RAY_AUTH_MODE is {mode}, and it and "
            "RAY_AUTH_TOKEN must equal those of the cluster"
        ) from error
    return Connection(address=str(context.address_info["address"]), embedded=False)


def _embed(slots: int | None) -> Connection:
    """Start an embedded cluster of one node, this machine."""
    import ray

    memory, store = _memory_sizes(None)
    sizes: dict[str, Any] = {"num_cpus": max(slots or 1, cpu_limit()), "_memory": memory, "object_store_memory": store}
    # Without an address, Ray would join whatever cluster it finds on this machine.
    context: Any = ray.init(address="local", include_dashboard=False, **sizes, **_COMMON)
    return Connection(str(context.address_info["address"]), embedded=True, head=ray._private.worker._global_node)


def _embed_nodes(shape: EmbeddedShape) -> Connection:
    """Start an embedded cluster of several nodes, node0, node1, ..., which share this machine's address, cores and memory."""
    import ray
    from ray.cluster_utils import Cluster

    memory, store = _memory_sizes(shape)
    common: dict[str, Any] = {"num_cpus": shape.slots, "memory": memory, "object_store_memory": store}
    cluster = Cluster()
    try:
        for index in range(shape.nodes):
            only_head: dict[str, Any] = {"include_dashboard": False} if index == 0 else {}
            cluster.add_node(**common, **only_head, labels={NAME_LABEL: f"node{index}"})
        ray.init(address=cluster.address, **_COMMON)
    except BaseException:
        cluster.shutdown()
        raise
    others = tuple(cluster.worker_nodes)
    return Connection(str(cluster.address), embedded=True, head=cluster.head_node, others=others, end=cluster.shutdown)


def configured_address() -> str | None:
    """Returns the cluster address in the environment variable ``RAY_ADDRESS``, or None if it is not set or empty."""
    return os.environ.get("RAY_ADDRESS") or None


def this_machine(slots: int, shape: EmbeddedShape | None = None) -> ClusterSpec:
    """Returns the cluster that `connect` would embed, without starting it: this machine with `slots` CPU slots, or the nodes of
    `shape` (then `slots` has no effect), each with an even share of the memory.

    The memory is what this process may use (`placement.nodes.limits`), less what the service takes besides its ranks; at least
    one byte.
    """
    memory = max(memory_limit().num_bytes - _service_bytes(shape), shape.nodes if shape is not None else 1)
    if shape is not None:
        share = memory // shape.nodes
        nodes = (NodeSpec(name=f"node{index}", slots=shape.slots, memory_bytes=share) for index in range(shape.nodes))
        return ClusterSpec(nodes=tuple(nodes))
    return ClusterSpec(nodes=(NodeSpec(name=platform.node() or "localhost", slots=slots, memory_bytes=memory),))


def memory_text(shape: EmbeddedShape | None = None) -> str:
    """Returns the memory of this machine that is left for the ranks of an embedded cluster, as a sentence with its source."""
    limit = memory_limit()
    return (
        f"This machine offers {limit.num_bytes:,} bytes ({limit.source}), of which Ray and the HTTP processes take about "
        f"{_service_bytes(shape):,}"
    )


def object_store_bytes(limit: MemoryLimit) -> int:
    """Returns the size of the object store of an embedded node in bytes: 256 MiB, or less where the memory is less than 4
    GiB."""
    return max(_LEAST_OBJECT_STORE_BYTES, min(_OBJECT_STORE_BYTES, limit.num_bytes // 16))


def _service_bytes(shape: EmbeddedShape | None) -> int:
    return _SERVICE_BYTES + (0 if shape is None else (shape.nodes - 1) * _NODE_BYTES)


def _memory_sizes(shape: EmbeddedShape | None) -> tuple[int | None, int]:
    """Returns the bytes for ranks and for the object store of an embedded node. Ray itself does not see limits of nested
    cgroups."""
    return this_machine(0, shape).nodes[0].memory_bytes, object_store_bytes(memory_limit())


def _check_answers(address: str) -> None:
    """Raises `ConnectionError` if nothing listens at the address. Ray itself would retry, and log errors, for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", "local" or a name only Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error


def _lock_embedded() -> None:
    """Require a random token, unless an authentication mode is set or `ray` is imported already, which reads it on import."""
    if "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
