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
        """Send consecutive parts of `input` to the ranks in order. The parts that they send to this rank arrive in `output`."""

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Work:
        """Send the tensor, which must stay alive until the work is done."""

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Work:
        """Receive into the tensor."""


def connect(store: Store, rank: int, size: int, device: torch.device, host: str, timeout: timedelta) -> Links:
    """Connect this rank: gloo for ``cpu``, listening at `host`; NCCL for ``cuda``.

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
