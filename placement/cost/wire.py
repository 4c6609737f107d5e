"""Wire bytes of each collective per rank, by the textbook algorithms, in one accounting for every backend.

A backend may move its bytes differently (shared memory sends none at all). The counters measure the cost of the layout, not the
work of one machine, so that they can be compared between backends and with an estimate. All numbers are exact integers::

    all_reduce      2 (n-1) M // n        ring; M bytes of the tensor, rounded down once
    all_gather      (n-1) own             pairwise; `own` bytes of this rank's rows
    reduce_scatter  M - own               pairwise; `own` bytes of the rows this rank keeps
    all_to_all      M - own               pairwise; `own` bytes of the rows this rank sends to itself
    send            M
    recv, barrier   0

With equal sizes these are the usual (n-1)/n of the whole tensor.
"""

from __future__ import annotations


def all_reduce_bytes(tensor_bytes: int, size: int) -> int:
    """Returns the bytes sent by each rank for a ring all-reduce of a tensor of `tensor_bytes` bytes over `size` ranks, rounded
    down."""
    return 2 * (size - 1) * tensor_bytes // size


def all_gather_bytes(own_bytes: int, size: int) -> int:
    """Returns the bytes sent by a rank for an all-gather over `size` ranks to which it contributes `own_bytes` bytes."""
    return (size - 1) * own_bytes


def scatter_bytes(tensor_bytes: int, own_bytes: int) -> int:
    """Returns the bytes sent by a rank that splits a tensor of `tensor_bytes` bytes over the ranks and keeps `own_bytes` of
    them (reduce-scatter, all-to-all)."""
    return tensor_bytes - own_bytes
