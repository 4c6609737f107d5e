"""Connecting to Ray: join a cluster by address, or start one inside this process.

The only place that touches Ray's environment variables; they must be set before `ray` is first imported.
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

from cluster.embedded import session
from cluster.nodes.topology import NAME_LABEL
from placement.layout.layout import LayoutError
from placement.nodes.hardware import ClusterSpec, NodeSpec

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
"""No tensor goes through the object store, so an embedded cluster needs little of it."""

_ANSWER_S = 10.0
"""A head that does not accept a connection in this time is not there."""


@dataclass(frozen=True)
class EmbeddedShape:
    """An embedded cluster: how many nodes, and the slots of each."""

    nodes: int
    slots: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """``2x4``: two nodes of four slots. Raises `LayoutError`."""
        found = re.fullmatch(r"([1-9]\d?)x([1-9]\d{0,3})", text)
        if found is None:
            raise LayoutError(f"nodes is {text!r}, but must be how many and how large, as in 2x4: two nodes of four slots")
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True)
class Connection:
    """The cluster this process is connected to; an embedded one was started by it, and ends with it."""

    address: str
    embedded: bool
    head: Any = None
    """Ray's own record of the processes of an embedded head."""
    others: tuple[Any, ...] = ()
    """The same of the other embedded nodes."""
    end: Callable[[], None] = field(default=lambda: None)
    """Ends what `disconnect` would leave of an embedded cluster."""


def connect(
    address: str | None = None,
    slots: int | None = None,
    environment: Mapping[str, str] | None = None,
    shape: EmbeddedShape | None = None,
) -> Connection:
    """Join the cluster at `address` (or ``RAY_ADDRESS``); with neither, start an embedded one with `slots` CPU slots.

    A slot is room for one rank, not a core: an embedded cluster has as many as the layout asks for, or the nodes of `shape`,
    which are raylets of this machine. It asks for a random token, so that no other program of the network can join it.
    `environment`: variables for the processes of an embedded cluster, unless they are set. Raises `ConnectionError` when no
    cluster answers at the address.
    """
    address = None if shape is not None else address or configured_address()
    if address is not None:
        _check_answers(address)
    for name, value in {**_DEFAULTS, **(environment or {})}.items():
        os.environ.setdefault(name, value)
    if address is not None:
        return _join(address)
    _lock_embedded()
    connection = _embed(slots) if shape is None else _embed_nodes(shape)
    kept = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN") if name in os.environ}
    session.remember(session.Session(connection.address, kept))
    return connection


def connect_running(address: str | None = None) -> Connection:
    """Join the cluster at `address`, ``RAY_ADDRESS``, or the one that a command of this person embeds on this machine.

    Raises `ConnectionError` where there is none.
    """
    found = None if address or configured_address() else session.latest()
    if found is not None:
        os.environ.update(found.environment)
    elif not address and not configured_address():
        raise ConnectionError("no address is given, RAY_ADDRESS is not set, and no shardwright serve runs on this machine")
    return connect(found.address if found is not None else address)


def disconnect(connection: Connection) -> None:
    """Leave the cluster; an embedded one ends."""
    import ray

    session.forget()
    with suppress(Exception):  # Ray tries again when this process ends
        ray.shutdown()
    with suppress(Exception):
        connection.end()


def leave() -> None:
    """Let go of a joined cluster."""
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
            f"{error}. Where something does answer there, it may be the token: RAY_AUTH_MODE is {mode} here, and mode and "
            "RAY_AUTH_TOKEN must be those of the cluster"
        ) from error
    return Connection(address=str(context.address_info["address"]), embedded=False)


def _embed(slots: int | None) -> Connection:
    """One node: this machine."""
    import ray

    cpus = max(slots or 1, os.cpu_count() or 1)
    # Without an address, Ray would join whatever cluster it finds on this machine.
    context: Any = ray.init(
        address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES, **_COMMON
    )
    return Connection(str(context.address_info["address"]), embedded=True, head=ray._private.worker._global_node)


def _embed_nodes(shape: EmbeddedShape) -> Connection:
    """Several nodes, which share this machine's address, cores and memory. They are called node0, node1, ..."""
    import ray
    from ray.cluster_utils import Cluster

    memory = this_machine(0, shape).nodes[0].memory_bytes
    common: dict[str, Any] = {"num_cpus": shape.slots, "memory": memory, "object_store_memory": _OBJECT_STORE_BYTES}
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
    """The cluster that the environment names (``RAY_ADDRESS``), if any."""
    return os.environ.get("RAY_ADDRESS") or None


def this_machine(slots: int, shape: EmbeddedShape | None = None) -> ClusterSpec:
    """The cluster that `connect` would embed: this machine, with all its memory and a slot for each rank, or the nodes of
    `shape`, with an even share of the memory each."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if shape is not None:
        share = memory // shape.nodes
        nodes = (NodeSpec(name=f"node{index}", slots=shape.slots, memory_bytes=share) for index in range(shape.nodes))
        return ClusterSpec(nodes=tuple(nodes))
    return ClusterSpec(nodes=(NodeSpec(name=platform.node() or "localhost", slots=slots, memory_bytes=memory),))


def _check_answers(address: str) -> None:
    """Raises `ConnectionError` where nobody listens: Ray itself would try, and complain, for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", "local" or a name only Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error


def _lock_embedded() -> None:
    """Ask for a random token, unless a mode is set or `ray` is imported already: it reads its mode then, once."""
    if "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
