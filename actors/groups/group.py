"""The collectives interface of a layer: the ranks along one parallel axis that it communicates with.

A layer receives a group and has no other access to other ranks. All ranks of a group call the same operations in the same
order. Sums are computed in rank order with fp32 accumulation, so that a layout gives the same bits in every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class GroupError(RuntimeError):
    """A collective that could not finish. The message names the operation, the axis, the peer and how long it waited."""


class Group(Protocol):
    """The collectives between the ranks of one axis. They split or join tensors along dimension 0.

    `calls` and `sent_bytes` count, by operation name, this rank's calls and the payload bytes it sent.
    """

    rank: int
    size: int
    axis: str
    calls: Counter[str]
    sent_bytes: Counter[str]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's `x` (same shape on all). It may reuse the memory of `x`."""

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Return every rank's `x`, joined along dim 0 in rank order. `sizes` are the rows of each rank, if they differ."""

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Return this rank's rows of the sum of every rank's `x`. `sizes` are the rows that each rank gets, if they differ."""

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send ``send[i]`` rows of `x` to each rank i. Returns ``receive[i]`` rows from each rank i, joined in rank order."""

    def send(self, x: Tensor, to: int) -> None:
        """Send `x` to group rank `to`. Returns when `x` may be reused, without waiting for the receiver."""

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Return the next tensor from group rank `source`; its shape and dtype must be known beforehand."""

    def barrier(self) -> None:
        """Return when every rank has called this."""

    def close(self) -> None:
        """Release the group's resources (sockets, shared memory). A second call has no effect."""
