"""From a rendezvous to the groups of one rank: which backend joins which ranks."""

from __future__ import annotations

from collections.abc import Mapping

from actors.config import Device, Rendezvous
from actors.model.group import Group
from actors.model.groups.rendezvous import join_store
from actors.model.groups.shared_memory import SharedMemoryGroup, shared_memory_works
from actors.model.groups.solo import SoloGroup
from actors.model.groups.torch_group import TorchGroup
from placement import mesh
from placement.layout import Layout


def connect(layout: Layout, world_rank: int, device: Device, rendezvous: Rendezvous) -> Mapping[str, Group]:
    """The group of `world_rank` along every axis of the mesh. All ranks call this, with the same rendezvous.

    Alone: solo. On CUDA: NCCL. On CPU: shared memory inside a node, gloo across nodes.
    """
    return {axis: _group(axis, mesh.group_of(layout, axis, world_rank), world_rank, device, rendezvous) for axis in mesh.AXES}


def _group(axis: str, members: list[int], world_rank: int, device: Device, rendezvous: Rendezvous) -> Group:
    rank, size = members.index(world_rank), len(members)
    name = f"{rendezvous.token}.{axis}.{members[0]}"
    if size == 1:
        return SoloGroup(axis)
    one_node = len({rendezvous.nodes[member] for member in members}) == 1
    if device == "cpu" and one_node and shared_memory_works():
        return SharedMemoryGroup.attach(name, rank, size, axis, rendezvous.timeout_s)
    store = join_store(rendezvous.token, rendezvous.hosts[0], rendezvous.store_port, rendezvous.timeout_s)
    return TorchGroup(store, name, rank, size, axis, device, rendezvous.hosts[world_rank], rendezvous.timeout_s)
