"""The group of a single rank, in which every collective is the identity, so that layers need no ``if size == 1``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.groups.base import CountedGroup


class SoloGroup(CountedGroup):
    """A rank that is alone on its axis. Every operation returns its argument; nothing is sent, so the counters stay at 0
    bytes."""

    def __init__(self, axis: str) -> None:
        super().__init__(rank=0, size=1, axis=axis)

    def close(self) -> None:
        """See `Group.close`. Does nothing: the group holds no resources."""

    def _all_reduce(self, x: Tensor) -> Tensor:
        return x

    def _all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return x

    def _reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return x

    def _all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return x

    def _send(self, x: Tensor, to: int) -> None:
        self._refuse("send", "there is no other rank")

    def _recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
        self._refuse("recv", "there is no other rank")

    def _barrier(self) -> None:
        pass
