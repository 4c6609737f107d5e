"""Traffic entries: collective calls with their byte counts, and one constructor for each operation (all-reduce, send, ...)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from placement.cost import wire

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv"]


@dataclass(frozen=True)
class TrafficEntry:
    """A number of equal calls of one operation on one axis, made by one rank; `where` names the region of the forward pass.

    `payload_bytes` is the size of the tensor that this rank passes to one call (for ``recv``: receives from it).
    `wire_bytes_per_rank` is the number of bytes that this rank sends in one call, as counted by `placement.cost.wire`.
    """

    where: str
    op: Op
    axis: str
    group_size: int
    calls: int
    payload_bytes: int
    wire_bytes_per_rank: int


def all_reduce(where: str, axis: str, size: int, tensor_bytes: int, calls: int = 1) -> TrafficEntry:
    """Returns the traffic entry of one rank for all-reduces of a tensor of `tensor_bytes` bytes. `where` names the region of
    the forward pass, `axis` the process group, `size` its number of ranks; `calls` is the number of equal calls."""
    return TrafficEntry(where, "all_reduce", axis, size, calls, tensor_bytes, wire.all_reduce_bytes(tensor_bytes, size))


def all_gather(where: str, axis: str, size: int, own_bytes: int, calls: int = 1) -> TrafficEntry:
    """Returns the traffic entry of one rank for all-gathers to which it contributes `own_bytes` bytes each. `where` names the
    region of the forward pass, `axis` the process group, `size` its number of ranks; `calls` is the number of equal calls."""
    return TrafficEntry(where, "all_gather", axis, size, calls, own_bytes, wire.all_gather_bytes(own_bytes, size))


def reduce_scatter(where: str, axis: str, size: int, tensor_bytes: int, own_bytes: int, calls: int = 1) -> TrafficEntry:
    """Returns the traffic entry of one rank for reduce-scatters of a tensor of `tensor_bytes` bytes, of which it keeps
    `own_bytes`. `where` names the region of the forward pass, `axis` the process group, `size` its number of ranks; `calls` is
    the number of equal calls."""
    return TrafficEntry(where, "reduce_scatter", axis, size, calls, tensor_bytes, wire.scatter_bytes(tensor_bytes, own_bytes))


def all_to_all(where: str, axis: str, size: int, tensor_bytes: int, own_bytes: int, calls: int = 1) -> TrafficEntry:
    """Returns the traffic entry of one rank for all-to-alls that split its tensor of `tensor_bytes` bytes over the ranks;
    `own_bytes` of them stay with itself. `where` names the region of the forward pass, `axis` the process group, `size` its
    number of ranks; `calls` is the number of equal calls."""
    return TrafficEntry(where, "all_to_all", axis, size, calls, tensor_bytes, wire.scatter_bytes(tensor_bytes, own_bytes))


def send(where: str, axis: str, size: int, tensor_bytes: int, calls: int = 1) -> TrafficEntry:
    """Returns the traffic entry of one rank for sends of a tensor of `tensor_bytes` bytes to one peer each. `where` names the
    region of the forward pass, `axis` the process group, `size` its number of ranks; `calls` is the number of equal calls."""
    return TrafficEntry(where, "send", axis, size, calls, tensor_bytes, tensor_bytes)


def recv(where: str, axis: str, size: int, tensor_bytes: int, calls: int = 1) -> TrafficEntry:
    """Returns the traffic entry of one rank for receives of a tensor of `tensor_bytes` bytes from one peer each. Its wire bytes
    are 0, since the sender counts them. `where` names the region of the forward pass, `axis` the process group, `size` its
    number of ranks; `calls` is the number of equal calls."""
    return TrafficEntry(where, "recv", axis, size, calls, tensor_bytes, 0)
