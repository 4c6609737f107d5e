"""The ranks one layer talks to, along one axis.

A layer is handed a group and knows nothing else of the world. All ranks of a group call the same operations in the
same order. Sums are taken in rank order with fp32 accumulation, so one layout gives the same bits run after run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class GroupError(RuntimeError):
    """A collective that could not finish: names the operation, the axis, the peer and how long it waited."""


class Group(Protocol):
    """Operations between the ranks of one axis. Dimension 0 is the one that is split or joined.

    `calls` and `sent_bytes` count, per operation name, what this rank did: calls, and payload bytes it put on the wire.
    """

    rank: int
    size: int
    axis: str
    calls: Counter[str]
    sent_bytes: Counter[str]

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x` (same shape on all). May reuse the memory of `x`."""

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Every rank's `x` joined along dim 0 in rank order. `sizes`: rows of each rank, where they differ."""

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """This rank's rows of the sum of every rank's `x`. `sizes`: rows each rank gets, where they differ."""

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """``send[i]`` rows of `x` go to rank i; returns the ``receive[i]`` rows from each rank i, joined in rank order."""

    def send(self, x: Tensor, to: int) -> None:
        """Send `x` to group rank `to`. Returns when `x` may be reused, without waiting for the receiver."""

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """The next tensor from group rank `source`; its shape and dtype are known beforehand."""

    def barrier(self) -> None:
        """Return when every rank has called this."""

    def close(self) -> None:
        """Release what the group holds (sockets, shared memory). Calling twice is harmless."""
