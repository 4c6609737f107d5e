"""The base class of all group backends: argument checks and counters. A backend implements the transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NoReturn

import torch
from torch import Tensor

from actors.groups.group import GroupError
from placement.cost import wire

DEFAULT_TIMEOUT_S = 30.0
"""Default time that one operation waits for its peers, in seconds."""


class CountedGroup(ABC):
    """Checks the arguments of each collective, counts it, and calls the backend's implementation (the methods with ``_``).

    Every size is an argument, so ranks with the same step plan agree on shapes without exchanging them.
    """

    def __init__(self, rank: int, size: int, axis: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not 0 <= rank < size:
            raise GroupError(f"{axis} group: rank {rank} is outside 0..{size - 1}")
        self.rank = rank
        self.size = size
        self.axis = axis
        self.timeout_s = timeout_s
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Group.all_reduce`."""
        self._count("all_reduce", wire.all_reduce_bytes(x.nbytes, self.size))
        return self._all_reduce(x)

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """See `Group.all_gather`."""
        if sizes is None:
            sizes = [x.shape[0]] * self.size
        elif len(sizes) != self.size or sizes[self.rank] != x.shape[0]:
            self._refuse("all_gather", f"sizes={list(sizes)} but this rank has {x.shape[0]} rows")
        self._count("all_gather", wire.all_gather_bytes(x.nbytes, self.size))
        return self._all_gather(x, sizes)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """See `Group.reduce_scatter`."""
        rows = x.shape[0]
        if sizes is None:
            if rows % self.size:
                self._refuse("reduce_scatter", f"{rows} rows do not divide by {self.size} ranks; pass sizes")
            sizes = [rows // self.size] * self.size
        elif len(sizes) != self.size or sum(sizes) != rows:
            self._refuse("reduce_scatter", f"sizes={list(sizes)} (sum {sum(sizes)}) but the tensor has {rows} rows")
        own_bytes = x.nbytes // rows * sizes[self.rank] if rows else 0
        self._count("reduce_scatter", wire.scatter_bytes(x.nbytes, own_bytes))
        return self._reduce_scatter(x, sizes)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `Group.all_to_all`."""
        rows = x.shape[0]
        if len(send) != self.size or len(receive) != self.size or sum(send) != rows or send[self.rank] != receive[self.rank]:
            self._refuse(
                "all_to_all",
                f"send={list(send)} must add up to the {rows} rows of the tensor, receive={list(receive)} must agree with "
                f"it on this rank's own rows, and both need {self.size} entries",
            )
        own_bytes = x.nbytes // rows * send[self.rank] if rows else 0
        self._count("all_to_all", wire.scatter_bytes(x.nbytes, own_bytes))
        return self._all_to_all(x, send, receive)

    def send(self, x: Tensor, to: int) -> None:
        """See `Group.send`."""
        self._check_peer("send", to)
        self._count("send", x.nbytes)
        self._send(x, to)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """See `Group.recv`."""
        self._check_peer("recv", source)
        self._count("recv", 0)
        return self._recv(tuple(shape), dtype, source)

    def barrier(self) -> None:
        """See `Group.barrier`."""
        self._count("barrier", 0)
        self._barrier()

    @abstractmethod
    def close(self) -> None:
        """See `Group.close`."""

    @abstractmethod
    def _all_reduce(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor: ...

    @abstractmethod
    def _all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor: ...

    @abstractmethod
    def _send(self, x: Tensor, to: int) -> None: ...

    @abstractmethod
    def _recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor: ...

    @abstractmethod
    def _barrier(self) -> None: ...

    def _count(self, operation: str, sent_bytes: int) -> None:
        self.calls[operation] += 1
        self.sent_bytes[operation] += sent_bytes

    def _check_peer(self, operation: str, peer: int) -> None:
        if peer == self.rank or not 0 <= peer < self.size:
            self._refuse(operation, f"peer {peer} must be another rank of 0..{self.size - 1}")

    def _refuse(self, operation: str, problem: str) -> NoReturn:
        raise GroupError(f"{operation} on axis {self.axis}, rank {self.rank} of {self.size}: {problem}")


def starts(sizes: Sequence[int]) -> list[int]:
    """Return the first row of each part when parts of `sizes` rows are laid end to end: the exclusive cumulative sum, of the
    same length."""
    return [0, *accumulate(sizes)][:-1]
