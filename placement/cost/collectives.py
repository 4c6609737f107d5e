"""One kind of collective call, with its bytes; a constructor for each operation of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from placement.cost import wire

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv"]


@dataclass(frozen=True)
class TrafficEntry:
    """`calls` equal calls of one operation on one axis, by one rank.

    `payload_bytes` is the tensor this rank brings to (or, for ``recv``, takes from) one call; `wire_bytes_per_rank` what this
    rank sends for one call, by `placement.cost.wire`.
    """

    where: str
    op: Op
    axis: str
    group_size: int
    calls: int
    payload_bytes: int
    wire_bytes_per_rank: int


def all_reduce(where: str, axis: str, size: int, tensor_bytes: int, calls: int = 1) -> TrafficEntry:
    """A sum of `tensor_bytes` over `size` ranks."""
    return TrafficEntry(where, "all_reduce", axis, size, calls, tensor_bytes, wire.all_reduce_bytes(tensor_bytes, size))


def all_gather(where: str, axis: str, size: int, own_bytes: int, calls: int = 1) -> TrafficEntry:
    """Rows of all ranks joined, of which this one brings `own_bytes`."""
    return TrafficEntry(where, "all_gather", axis, size, calls, own_bytes, wire.all_gather_bytes(own_bytes, size))


def reduce_scatter(where: str, axis: str, size: int, tensor_bytes: int, own_bytes: int, calls: int = 1) -> TrafficEntry:
    """A sum of `tensor_bytes` of which this rank keeps `own_bytes`."""
    return TrafficEntry(where, "reduce_scatter", axis, size, calls, tensor_bytes, wire.scatter_bytes(tensor_bytes, own_bytes))


def all_to_all(where: str, axis: str, size: int, tensor_bytes: int, own_bytes: int, calls: int = 1) -> TrafficEntry:
    """`tensor_bytes` split over the ranks, `own_bytes` of them to this one."""
    return TrafficEntry(where, "all_to_all", axis, size, calls, tensor_bytes, wire.scatter_bytes(tensor_bytes, own_bytes))


def send(where: str, axis: str, size: int, tensor_bytes: int, calls: int = 1) -> TrafficEntry:
    """A tensor to one peer, in a group of `size` ranks."""
    return TrafficEntry(where, "send", axis, size, calls, tensor_bytes, tensor_bytes)


def recv(where: str, axis: str, size: int, tensor_bytes: int, calls: int = 1) -> TrafficEntry:
    """A tensor from one peer. The sender counts its bytes."""
    return TrafficEntry(where, "recv", axis, size, calls, tensor_bytes, 0)
