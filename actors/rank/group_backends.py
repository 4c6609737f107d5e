"""Makes the group of one axis on this rank, whatever it runs over."""

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
    """NCCL between GPUs; between CPUs shared memory if all members are on one host that can, else gloo.

    Every member must come to the same answer, so it depends on nothing that differs between members of one group
    (hosts of a cluster are taken to be of one architecture).
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
    """The group of the world ranks `members` along `axis`; every member calls this in the same order of axes.

    `engine` names this life of this replica: letters, digits, dots and underscores, another one after a failure.
    `host`: address of this rank for gloo. Raises `GroupError`, naming the ranks that did not come.
    """
    if len(members) == 1:
        return SoloGroup(axis)
    name = f"{engine}.{axis}.{members[0]}"
    rank, size = list(members).index(world_rank), len(members)
    if backend == "shared_memory":
        return SharedMemoryGroup.attach(name, rank, size, axis, timeout_s)
    device = "cuda" if backend == "nccl" else "cpu"
    return TorchGroup(store, name, rank, size, axis, device, host, timeout_s)
