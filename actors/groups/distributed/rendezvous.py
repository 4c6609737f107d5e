"""The rendezvous of a replica's ranks: a key-value store (TCPStore) on the host of its first rank.

The store binds a port chosen by the kernel, and the bound port is published. A port that was looked for first and bound later
could be taken by another engine in between. The store also holds the name of its engine, so that a rank with a stale or wrong
address gets an error instead of joining another engine.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from actors.groups.base import DEFAULT_TIMEOUT_S
from actors.groups.group import GroupError

_TOKEN = "engine"


def serve_store(engine: str, host: str = "127.0.0.1", timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[TCPStore, int]:
    """Start a key-value store for the engine named `engine`, on a free port. Returns the store, which the caller must keep
    alive, and the port to publish.

    `host` is the name or address under which other ranks reach this one; `timeout_s` limits each operation on the store. Raises
    `RuntimeError` if the store cannot be started, or not be reached under `host`.
    """
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    store.set(_TOKEN, engine)
    return store, store.port


def join_store(engine: str, host: str, port: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> TCPStore:
    """Connect to the store that `serve_store` has started at `host` and `port`, and return it. `engine` is the name of the
    engine that must own it; `timeout_s` limits connecting and each later operation.

    Raises `GroupError` if it is unreachable or belongs to another engine.
    """
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        found = bytes(store.get(_TOKEN)).decode()
    except RuntimeError as error:
        raise GroupError(f"no rendezvous store at {host}:{port} within {timeout_s:.0f} s: {error}") from error
    if found != engine:
        raise GroupError(f"the rendezvous store at {host}:{port} belongs to engine {found!r}, not to {engine!r}")
    return store
