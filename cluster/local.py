"""Connecting to Ray: join a cluster by address, or start one inside this process.

The only place that touches Ray's environment variables; they must be set before `ray` is first imported.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from placement.hardware import ClusterSpec, NodeSpec

NAMESPACE = "shardwright"

_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray runs workers at nice 15, which starves ranks on a busy machine
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

_OBJECT_STORE_BYTES = 256 * 2**20
"""No tensor travels through the object store, so an embedded cluster needs little of it."""

_ANSWER_S = 10.0
"""A head that does not accept a connection in this time is not there."""


@dataclass(frozen=True)
class Connection:
    """The cluster this process is connected to; an embedded one was started by it, and ends with it."""

    address: str
    embedded: bool


def connect(address: str | None = None, slots: int | None = None, environment: Mapping[str, str] | None = None) -> Connection:
    """Join the cluster at `address` (or ``RAY_ADDRESS``); with neither, start an embedded one with `slots` CPU slots.

    A slot is a seat for one rank, not a core: an embedded cluster has as many as the layout asks for. An embedded
    cluster asks for a random token, so that no other program of the network can join it. `environment`: variables for
    the processes of an embedded cluster, unless they are set. Raises `ConnectionError` when no cluster answers at the
    address.
    """
    address = address or configured_address()
    if address is not None:
        _check_answers(address)
    for name, value in {**_DEFAULTS, **(environment or {})}.items():
        os.environ.setdefault(name, value)
    if address is None:
        _lock_embedded()
    import ray

    common: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "ignore_reinit_error": True,
    }
    if address is None:
        cores = os.cpu_count() or 1
        common |= {"num_cpus": max(slots or 1, cores), "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    # Without an address, Ray would join whatever cluster it finds on this machine.
    context: Any = ray.init(address=address or "local", **common)
    return Connection(address=str(context.address_info["address"]), embedded=address is None)


def configured_address() -> str | None:
    """The cluster that the environment names (``RAY_ADDRESS``), if any."""
    return os.environ.get("RAY_ADDRESS") or None


def this_machine(slots: int) -> ClusterSpec:
    """The cluster that `connect` would embed: this machine, with all its memory and a seat for each rank."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
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
