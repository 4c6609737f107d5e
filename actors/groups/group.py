"""The collectives interface of a layer: the ranks along one parallel axis that it communicates with.

A layer receives a group and has no other access to other ranks. All ranks of a group call the same operations in the same
order. Sums are computed in rank order with fp32 accumulation, so that a layout gives the same bits in every run. The expert
all-to-all of expert parallelism, which uses these, is `actors.model.moe.dispatch`.
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
        """Return the element-wise sum of every rank's `x`, which has the same shape and dtype on all. The result may reuse the
        memory of `x`.

        Raises `GroupError` if a peer does not come within the group's timeout, has died or left, or the group is closed.
        """

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Return every rank's `x` [rows, ...], joined along dim 0 in rank order. `sizes` are the rows of each rank, if they
        differ.

        Raises `GroupError` if `sizes` has not one entry a rank, or another number of rows for this rank than `x`; otherwise as
        `all_reduce` does.
        """

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Return this rank's rows of the sum of every rank's `x` [rows, ...]. `sizes` are the rows that each rank gets, in rank
        order; by default all get equally many.

        Raises `GroupError` if the rows do not divide by the ranks (without `sizes`), or `sizes` has not one entry a rank or
        another sum; otherwise as `all_reduce` does.
        """

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send ``send[i]`` consecutive rows of `x` [rows, ...] to each rank i. Returns ``receive[i]`` rows from each rank i,
        joined in rank order.

        Raises `GroupError` if `send` or `receive` has not one entry a rank, `send` does not add up to the rows of `x`, or the
        two differ for this rank itself; otherwise as `all_reduce` does.
        """

    def send(self, x: Tensor, to: int) -> None:
        """Send `x` to group rank `to`. Returns when `x` may be reused, without waiting for the receiver, unless too many
        earlier messages to it are not taken yet.

        Raises `GroupError` if `to` is this rank or not in the group, if the receiver fails or is late, or if the group is
        closed.
        """

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Return the next tensor that group rank `source` has sent to this rank. Its `shape` and `dtype` must be those of the
        sender.

        Raises `GroupError` if `source` is this rank or not in the group, if nothing comes within the group's timeout, or if the
        group is closed; most backends also raise it for another shape or dtype.
        """

    def barrier(self) -> None:
        """Return when every rank has called this. Raises `GroupError` as `all_reduce` does."""

    def close(self) -> None:
        """Leave the group and release its resources (sockets, shared memory). Peers that wait for this rank raise `GroupError`.
        A second call has no effect."""
