"""A group over `torch.distributed`: gloo between CPUs, NCCL between GPUs.

The process group is built directly from a store, never through `init_process_group`: a rank belongs to several groups with
different members, and after a failure a replica builds new ones (with a new prefix in the store) in the same process.

All operations except point-to-point use one primitive, an uneven all-to-all of bytes, and sums are computed locally in rank
order:

* gloo's own sums depend on where an element is in the buffer (three ranks or more), and accumulate bf16 in bf16;
* its all-to-all supports uneven and empty parts, and is its fastest collective;
* each rank communicates with every other, so all of them notice at once when one is gone. In a ring, only its neighbours do.

On CUDA an operation returns once it is queued on the stream, as always with NCCL. A peer that never arrives is detected by the
caller that waits for the result of the step, and by NCCL's own watchdog after `timeout_s`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, Work

from actors.groups.base import DEFAULT_TIMEOUT_S, CountedGroup
from actors.groups.distributed.links import Links, connect
from actors.groups.distributed.members import StoreMembers
from actors.groups.group import GroupError
from actors.groups.reduction import sum_in_rank_order

_GATHER_BYTES = 256 * 1024
"""Up to this size, three or more ranks all-reduce in one exchange of whole tensors; above it, in two exchanges of 1/n each."""
_SENDS_IN_FLIGHT = 32
"""Sends per peer that may be unfinished before another one waits for the oldest. This is more than the number of plans in
flight, because a stage receives the tokens of a step only when it has another plan."""


class TorchGroup(CountedGroup):
    """One rank of a process group, created by all members at the same time.

    Args:
        store: the replica's store (`serve_store`, `join_store`); one client serves one thread at a time.
        name: of this group, unique among the replica's groups and generations, for example ``"3/tp-0"``; equal on all members.
        device: ``cpu`` uses gloo, ``cuda`` NCCL (with the current CUDA device; one rank per GPU).
        host: address of this rank that its peers can reach; gloo listens there.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        axis: str,
        device: torch.device | str = "cpu",
        host: str = "127.0.0.1",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(rank, size, axis, timeout_s)
        self._timeout = timedelta(seconds=timeout_s)
        self._sends: deque[tuple[Work, Tensor, int]] = deque()
        self._device = torch.device(device)
        prefixed = PrefixStore(name, store)
        title = f"{axis} group {name!r}, rank {rank} of {size}"
        self._members = StoreMembers(prefixed, rank, size, title, self._timeout)
        try:
            self._group: Links | None = connect(prefixed, rank, size, self._device, host, self._timeout)
            # NCCL runs the two directions of a pair one after the other: sending both ways at once would deadlock.
            self._upward: Links | None = self._group
            if self._device.type == "cuda":
                self._upward = connect(PrefixStore("up", prefixed), rank, size, self._device, host, self._timeout)
        except RuntimeError as error:
            raise GroupError(f"{title}: could not connect; {self._members.missing()}: {error}") from error

    def close(self) -> None:
        """See `Group.close`. Sends that the receiver has not taken may be lost."""
        self._group = self._upward = None
        self._sends.clear()

    def _all_reduce(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        if self.size == 2 or x.nbytes <= _GATHER_BYTES:
            gathered = self._gather("all_reduce", flat, [flat.numel()] * self.size)
            return sum_in_rank_order(gathered.view(self.size, -1).unbind()).view(x.shape)
        sizes = [len(part) for part in torch.tensor_split(flat, self.size)]
        return self._gather("all_reduce", self._scatter_sum("all_reduce", flat, sizes), sizes).view(x.shape)

    def _all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return self._gather("all_gather", x, sizes)

    def _reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return self._scatter_sum("reduce_scatter", x, sizes)

    def _all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return self._exchange("all_to_all", x, send, receive)

    def _barrier(self) -> None:
        ones = torch.ones(self.size, dtype=torch.uint8, device=self._device)
        self._exchange("barrier", ones, [1] * self.size, [1] * self.size)

    def _gather(self, operation: str, x: Tensor, sizes: Sequence[int]) -> Tensor:
        copies = x.repeat(self.size, *[1] * (x.dim() - 1))
        return self._exchange(operation, copies, [len(x)] * self.size, sizes)

    def _scatter_sum(self, operation: str, x: Tensor, sizes: Sequence[int]) -> Tensor:
        own = sizes[self.rank]
        received = self._exchange(operation, x, sizes, [own] * self.size)
        return sum_in_rank_order(received.view(self.size, own, *x.shape[1:]).unbind())

    def _exchange(self, operation: str, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send ``send[i]`` rows of `x` to each rank i. Returns ``receive[i]`` rows from each rank i, joined in rank order."""
        out = x.new_empty(sum(receive), *x.shape[1:])
        row_bytes = x[0].nbytes if len(x) else out[:1].nbytes
        splits = [[rows * row_bytes for rows in sizes] for sizes in (receive, send)]
        group = self._group or self._closed(operation)
        began = time.monotonic()
        try:
            group.alltoall_base(_as_bytes(out), _as_bytes(x.contiguous()), *splits).wait(self._timeout)
        except RuntimeError as error:
            self._fail(operation, began, error)
        return out

    def _send(self, x: Tensor, to: int) -> None:
        # gloo's send ends when the receiver has taken the data, so a copy is kept alive here and the caller does not wait.
        copy = x.clone(memory_format=torch.contiguous_format)
        group = (self._upward if to > self.rank else self._group) or self._closed("send")
        began = time.monotonic()
        try:
            self._sends.append((group.send([_as_bytes(copy)], to, 0), copy, to))
            while len(self._sends) > _SENDS_IN_FLIGHT * (self.size - 1):
                to = self._sends[0][2]
                self._sends[0][0].wait(self._timeout)
                self._sends.popleft()
        except RuntimeError as error:
            self._fail("send", began, error, peer=to)

    def _recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=self._device)
        group = (self._upward if source < self.rank else self._group) or self._closed("recv")
        began = time.monotonic()
        try:
            group.recv([_as_bytes(out)], source, 0).wait(self._timeout)
        except RuntimeError as error:
            self._fail("recv", began, error, peer=source)
        return out

    def _closed(self, operation: str) -> NoReturn:
        self._refuse(operation, "this group is closed (by `close`, or by an earlier failure)")

    def _fail(self, operation: str, began: float, error: RuntimeError, peer: int | None = None) -> NoReturn:
        waited_s = time.monotonic() - began
        # After one failure gloo refuses every later operation. Closing makes peers that wait for this rank fail as well.
        self.close()
        with_peer = "" if peer is None else f" with rank {peer}"
        raise GroupError(
            f"{operation}{with_peer} on axis {self.axis}, rank {self.rank} of {self.size}, failed after {waited_s:.1f} s: "
            f"{self._members.missing()} ({str(error).splitlines()[0]})"
        ) from error


def _as_bytes(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as ``[bytes]``, so that every dtype is sent in the same way."""
    return x.view(-1).view(torch.uint8)
