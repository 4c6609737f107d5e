"""Where the ranks of a replica first meet: a key-value store on the host of its first rank.

The kernel chooses the port while the store binds it, and the bound port is what gets published: a port that is
looked for first and bound later can be taken by another engine in between. The store also carries its engine's token,
so a rank that was given a stale or foreign address is told so instead of joining strangers.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from actors.groups.base import DEFAULT_TIMEOUT_S
from actors.groups.group import GroupError

_TOKEN = "engine"


def serve_store(engine: str, host: str = "127.0.0.1", timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[TCPStore, int]:
    """Start a store for the engine named `engine`; returns it (keep it alive) and the port to publish.

    `host`: the name or address under which other ranks reach this one.
    """
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    store.set(_TOKEN, engine)
    return store, store.port


def join_store(engine: str, host: str, port: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> TCPStore:
    """Connect to the store that `serve_store` published. Raises `GroupError` if it is not there or not this engine's."""
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        found = bytes(store.get(_TOKEN)).decode()
    except RuntimeError as error:
        raise GroupError(f"no rendezvous store at {host}:{port} within {timeout_s:.0f} s: {error}") from error
    if found != engine:
        raise GroupError(f"the rendezvous store at {host}:{port} belongs to engine {found!r}, not to {engine!r}")
    return store
