"""Selects the backend of a communication group (NCCL, gloo, shared memory) and connects the group of one axis on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch._C._distributed_c10d import Store

from actors.groups.base import DEFAULT_TIMEOUT_S
from actors.groups.distributed.torch_group import TorchGroup
from actors.groups.group import Group
from actors.groups.shared_memory.shared_memory import SharedMemoryGroup, shared_memory_works
from actors.groups.solo import SoloGroup

BackendName = Literal["shared_memory", "gloo", "nccl"]


def choose_backend(device_type: str, num_hosts: int) -> BackendName:
    """Return the backend of a group: NCCL between GPUs; between CPUs, shared memory if all members are on one host that
    supports it, else gloo.

    `device_type` is ``cuda`` or ``cpu``; `num_hosts` is the number of different hosts of the group's members. Every member must
    choose the same backend, so the choice depends on nothing that differs between members. (The hosts of a cluster are assumed
    to have one architecture.)
    """
    if device_type == "cuda":
        return "nccl"
    return "shared_memory" if num_hosts == 1 and shared_memory_works() else "gloo"


def connect_group(
    backend: BackendName,
    store: Store,
    engine: str,
    axis: str,
    members: Sequence[int],
    world_rank: int,
    host: str = "127.0.0.1",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Group:
    """Return the group of the world ranks `members` along `axis`, one of which is `world_rank`. Every member calls this, in the
    same order of axes, and waits at most `timeout_s` seconds for the others.

    `store` is the rendezvous store of the replica. `engine` is a name for this generation of the replica, which changes after a
    failure; it consists of letters, digits, dots and underscores. `host` is the address of this rank for gloo. Raises
    `GroupError`, naming the ranks that did not join.
    """
    if len(members) == 1:
        return SoloGroup(axis)
    name = f"{engine}.{axis}.{members[0]}"
    rank, size = list(members).index(world_rank), len(members)
    if backend == "shared_memory":
        return SharedMemoryGroup.attach(name, rank, size, axis, timeout_s)
    device = "cuda" if backend == "nccl" else "cpu"
    return TorchGroup(store, name, rank, size, axis, device, host, timeout_s)
