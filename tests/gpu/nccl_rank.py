"""One rank of an NCCL group, as a process with a GPU of its own (run by `tests/gpu/test_nccl.py`).

``python nccl_rank.py RANK WORLD PORT TOKEN DIRECTORY KIND``: runs the battery's cases of KIND, and leaves what came of them in
DIRECTORY.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from actors.groups.distributed.rendezvous import join_store
from actors.groups.distributed.torch_group import TorchGroup
from actors.groups.group import Group
from tests.cpu.groups import battery

TIMEOUT_S = 60.0


class OnDevice:
    """A group of GPUs for cases that are written for tensors on the CPU."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.rank, self.size, self._group, self._device = group.rank, group.size, group, device

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(x.to(self._device)).cpu()

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        return self._group.all_gather(x.to(self._device), sizes).cpu()

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        return self._group.reduce_scatter(x.to(self._device), sizes).cpu()

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return self._group.all_to_all(x.to(self._device), send, receive).cpu()

    def send(self, x: Tensor, to: int) -> None:
        self._group.send(x.to(self._device), to)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        return self._group.recv(shape, dtype, source).cpu()


def main(rank: int, world: int, port: int, token: str, directory: Path, kind: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = TorchGroup(join_store(token, "127.0.0.1", port), token, rank, world, "tp", device, timeout_s=TIMEOUT_S)
    there = OnDevice(group, device)
    cases = [(label, act) for label, act, _ in battery.cases(world) if label.startswith("ring") == (kind == "rings")]
    with torch.inference_mode():
        torch.save({label: act(there) for label, act in cases}, directory / f"{rank}.pt")  # type: ignore[arg-type]
    group.barrier()
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]), sys.argv[6])
