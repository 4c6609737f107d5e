"""Fleet sizing: how many machines (nodes or Kubernetes pods) of one kind a layout needs, and how they are grouped.

Replicas that fit into one machine share it, as many as it holds. A larger replica gets a group of whole machines of its own;
a stage that fits into one machine is never split over two::

    tp=4 on machines of 8          2 replicas a machine
    tp=8,pp=2 on machines of 8     1 replica on 2 machines (a group of 2)
    tp=4,pp=4 on machines of 8     1 replica on 2 machines, 2 stages on each
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from placement.layout.layout import Layout, LayoutError
from placement.nodes.hardware import ClusterSpec, DeviceKind, NodeSpec

MIB, GIB = 2**20, 2**30
TRANSFER_BYTES = 8 * MIB
"""Upper bound of the shared memory that a rank uses for KV hand-off: 4.3 MB were measured (NIXL 1.5, UCX, two ranks on one
node)."""
MOST_MACHINES = 10_000
"""Maximum number of machines of one layout. A larger number is taken for a typing error, since every machine is listed."""


class Machine(BaseModel):
    """One kind of machine or pod: its slots, CPUs and memory. `memory_bytes` is host RAM, whatever the device kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slots: Annotated[int, Field(ge=1)]
    kind: DeviceKind = "cpu"
    cpus: Annotated[int, Field(ge=1)]
    memory_bytes: Annotated[int, Field(ge=GIB)]
    accelerator: str | None = None

    @property
    def shm_bytes(self) -> int:
        """Bytes of shared memory (/dev/shm) for the object store, CPU rank groups and NCCL: a quarter of the RAM, at most 16
        GiB."""
        return min(16 * GIB, self.memory_bytes // 4)

    @property
    def object_store_bytes(self) -> int:
        """Bytes of Ray's object store: half of the shared memory, at most 1 GiB, since no tensors pass through it."""
        return min(GIB, self.shm_bytes // 2)

    @property
    def ray_cpus(self) -> int:
        """Number of CPUs declared to Ray: the slots on a CPU machine, all CPUs on a GPU machine."""
        return self.slots if self.kind == "cpu" else self.cpus

    def require_cpus(self) -> None:
        """Raises `LayoutError` if a GPU machine has fewer CPUs than slots: each rank requests one CPU
        (`placement.nodes.bundles`)."""
        if self.ray_cpus < self.slots:
            raise LayoutError(
                f"a rank asks for a CPU beside its GPU, but a machine of {self.slots} GPUs has cpus={self.cpus}: give it "
                f"cpus={self.slots} or more, or {self.cpus} slots at most"
            )

    def require_room_for_transfers(self) -> None:
        """Raises `LayoutError` if the shared memory left beside the object store is less than `TRANSFER_BYTES` for each slot,
        which a rank may need to hand off KV."""
        least = 2 * self.slots * TRANSFER_BYTES  # the object store takes up to half
        if self.shm_bytes < least:
            raise LayoutError(
                f"{self.slots} ranks that hand off KV take {TRANSFER_BYTES // MIB} MiB of shared memory each, to be left "
                f"beside the object store, but a machine of {self.memory_bytes // MIB:,} MiB has {self.shm_bytes // MIB:,} MiB "
                f"of it, a quarter: give it {4 * least // MIB:,} MiB of memory or more, or fewer slots"
            )


class Fleet(BaseModel):
    """The machines of a deployment: `groups` groups of `hosts` machines, each group serving `replicas_a_group` replicas."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    machine: Machine
    hosts: int
    groups: int
    replicas_a_group: int

    @property
    def machines(self) -> int:
        """Total number of machines: ``hosts * groups``."""
        return self.hosts * self.groups

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster that these machines form, with nodes ``machine0``, ``machine1`` and so on. The memory of a GPU machine
        counts as unknown, since only its host RAM is given."""
        machine = self.machine
        memory = machine.memory_bytes if machine.kind == "cpu" else None
        nodes = (
            NodeSpec(name=f"machine{at}", slots=machine.slots, kind=machine.kind, memory_bytes=memory)
            for at in range(self.machines)
        )
        return ClusterSpec(nodes=tuple(nodes))

    def require_memory(self, weight_bytes: int) -> None:
        """Raises `LayoutError` if the weights alone, without KV cache, exceed the memory of a CPU machine.

        `weight_bytes` is the total of all ranks of one replica, in bytes. GPU machines are not checked.
        """
        least = weight_bytes * self.replicas_a_group // self.hosts
        if self.machine.kind == "cpu" and self.machine.memory_bytes < least:
            raise LayoutError(
                f"the weights of the ranks on one machine take {-(-least // MIB):,} MiB, but memory="
                f"{self.machine.memory_bytes // MIB}MiB: give it more than that, or use more machines of fewer slots"
            )


def fleet(layout: Layout, machine: Machine) -> Fleet:
    """Returns the machines, all equal to `machine`, for all replicas of a layout.

    Raises `LayoutError` if a tp group does not fit into one machine, if a GPU machine has too few CPUs, or if more than
    `MOST_MACHINES` machines are needed.
    """
    machine.require_cpus()
    made = _fleet(layout, machine)
    if made.machines > MOST_MACHINES:
        most = MOST_MACHINES // made.hosts * made.replicas_a_group
        fewer = f"replicas={most} or fewer, or " if most else ""
        raise LayoutError(
            f"replicas={layout.replicas} on machines of {machine.slots} slots take {made.machines:,} machines, more than "
            f"{MOST_MACHINES:,}: use {fewer}machines with more slots"
        )
    return made


def _fleet(layout: Layout, machine: Machine) -> Fleet:
    room = machine.slots // layout.tp
    if room == 0:
        raise LayoutError(
            f"tp={layout.tp} does not fit inside one machine of {machine.slots} slots, and a tp group never spans machines: "
            f"use tp={machine.slots} or less, or machines with {layout.tp} slots"
        )
    bundles, of_stage = layout.world // layout.tp, layout.stage_ranks // layout.tp
    if bundles <= room:
        shared = min(room // bundles, layout.replicas)
        return Fleet(machine=machine, hosts=1, groups=-(-layout.replicas // shared), replicas_a_group=shared)
    hosts = -(-layout.pp // (room // of_stage)) if of_stage <= room else -(-bundles // room)
    return Fleet(machine=machine, hosts=hosts, groups=layout.replicas, replicas_a_group=1)
