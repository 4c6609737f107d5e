"""Creates `torch.distributed` process groups (gloo, NCCL) directly from a store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, Work

from actors.groups.group import GroupError


class Links(Protocol):
    """The methods of a process group that are used. All tensors are ``[bytes]``, and all sizes are bytes."""

    def alltoall_base(self, output: Tensor, input: Tensor, receive: Sequence[int], send: Sequence[int], /) -> Work:
        """Send consecutive parts of `input` to the ranks in order, `send[i]` bytes to rank i; the `receive[i]` bytes that rank
        i sends here arrive in `output`, in rank order. Returns the pending operation; ``wait`` on it raises `RuntimeError` on
        failure."""

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Work:
        """Send the only tensor of `tensors`, which must stay alive until the work is done, to group rank `to`. `tag` must equal
        the receiver's. Returns the pending operation; ``wait`` on it raises `RuntimeError` on failure."""

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Work:
        """Receive from group rank `source` into the only tensor of `tensors`. `tag` must equal the sender's. Returns the
        pending operation; ``wait`` on it raises `RuntimeError` on failure."""


def connect(store: Store, rank: int, size: int, device: torch.device, host: str, timeout: timedelta) -> Links:
    """Connect this rank to the `size` ranks that use `store`, and return the process group: gloo for a ``cpu`` device,
    listening at the address `host`; NCCL for ``cuda``. `timeout` limits connecting and each later operation.

    Returns once all ranks are connected (gloo) or registered (NCCL). Raises `RuntimeError` if a rank cannot be reached in time,
    and `GroupError` if torch lacks NCCL.
    """
    if device.type == "cpu":
        from torch._C._distributed_c10d import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        return cast(Links, ProcessGroupGloo(store, rank, size, options))
    if not dist.is_nccl_available():
        raise GroupError(f"ranks on {device} need NCCL, which this build of torch lacks; use device 'cpu' (gloo)")
    from torch._C._distributed_c10d import ProcessGroupNCCL

    nccl_options = ProcessGroupNCCL.Options()
    nccl_options._timeout = timeout
    return cast(Links, ProcessGroupNCCL(store, rank, size, nccl_options))
