"""Connects the communication groups of one rank, and selects a backend (NCCL, gloo, shared memory) for each."""

from __future__ import annotations

from collections.abc import Mapping

from actors.groups.distributed.rendezvous import join_store
from actors.groups.group import Group
from actors.rank.group_backends import choose_backend, connect_group
from actors.wire.rank_config import Device, Rendezvous
from placement.layout import mesh
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec


def connect(spec: ModelSpec, layout: Layout, world_rank: int, device: Device, rendezvous: Rendezvous) -> Mapping[str, Group]:
    """Return the group of `world_rank` along every parallel axis of `spec` under `layout` that communicates, by axis.

    `device` is the type of the rank's device. A collective call: all ranks call this with the same `rendezvous`. Raises
    `GroupError` if the rendezvous store is unreachable or another replica's, or if a peer does not join within
    `rendezvous.timeout_s` seconds.
    """
    token, host, timeout_s = rendezvous.token, rendezvous.hosts[world_rank], rendezvous.timeout_s
    store = join_store(token, rendezvous.hosts[0], rendezvous.store_port, timeout_s)
    groups = {}
    for axis in mesh.talking_axes(spec, layout):
        members = mesh.group_of(layout, axis, world_rank)
        backend = choose_backend(device, len({rendezvous.nodes[member] for member in members}))
        groups[axis] = connect_group(backend, store, token, axis, members, world_rank, host, timeout_s)
    return groups
