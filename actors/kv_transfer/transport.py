"""Moving bytes from this process's memory into another's, without the other doing anything: the interface.

    writer                                        reader
                                    register ←─── its pools (one tensor a layer)
    connect(description)  ←─────────── describe
    write(peer, ranges, tag)  ══ bytes ══════→    memory it reserved before
                              ── tag ────────→    poll: the bytes lie there (data always before the tag)

A pool is named by a number: that of its layer, or `STAGING`. `actors.kv_transfer.local` is the transport of one process, for
tests; `actors.kv_transfer.nixl_transport` the one between processes and hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STAGING = -1
"""The pool through which small slices go (`actors.kv_transfer.staging`)."""


class TransferError(RuntimeError):
    """A transfer that could not be begun or ended: names the peer, and what was to be moved."""


@dataclass(frozen=True)
class Ranges:
    """Runs of bytes to move, [runs, 5]: pool and offset on the writer's side, pool and offset on the other, length."""

    table: NDArray[np.int64]

    @classmethod
    def single(cls, pool: int, offset: int, peer_pool: int, peer_offset: int, length: int) -> Ranges:
        return cls(np.array([[pool, offset, peer_pool, peer_offset, length]], np.int64))

    def __len__(self) -> int:
        return len(self.table)

    @property
    def num_bytes(self) -> int:
        return int(self.table[:, 4].sum())

    def check(self, own: Mapping[int, int], peers: Mapping[int, int]) -> None:
        """Raise `ValueError` unless every run lies inside a pool on both sides; the mappings say how long each pool is.

        A write past a pool's end would land in memory that is someone else's.
        """
        for side, sizes, pool_column in (("own", own, 0), ("the peer's", peers, 2)):
            for pool in np.unique(self.table[:, pool_column]).tolist():
                runs = self.table[self.table[:, pool_column] == pool]
                start, end = int(runs[:, pool_column + 1].min()), int((runs[:, pool_column + 1] + runs[:, 4]).max())
                if pool not in sizes:
                    raise ValueError(f"{side} pool {pool} is not registered: the pools are {sorted(sizes)}")
                if start < 0 or end > sizes[pool]:
                    raise ValueError(f"bytes {start}..{end} of {side} pool {pool}, which has {sizes[pool]}")


@dataclass(frozen=True)
class Notice:
    """What a peer said with its bytes, which have arrived."""

    peer: str
    tag: bytes


class Transfer(Protocol):
    """A write under way. The writer's bytes must stay as they are until it is done."""

    def is_done(self) -> bool:
        """Whether the bytes are there. Raises `TransferError` where they never will be."""
        ...


class Transport(Protocol):
    """One process's end. Not safe for several threads at once."""

    bytes_sent: int
    """Payload bytes of all writes so far."""

    def register(self, pools: Mapping[int, Tensor]) -> None:
        """Make contiguous tensors known as pools, once, before `describe`."""
        ...

    def describe(self) -> bytes:
        """What a peer needs to write here."""
        ...

    def connect(self, description: bytes) -> str:
        """Be able to write to the peer that described itself so; its name. Connecting again replaces what was known of it.

        Raises `TransferError` where it cannot be reached or is not understood.
        """
        ...

    def write(self, peer: str, ranges: Ranges, tag: bytes) -> Transfer:
        """Begin to write own bytes into the peer's pools; it is told `tag` once all of them are there.

        Without ranges only the tag goes. Raises `ValueError` for ranges outside the pools, `TransferError` where the peer
        is not connected.
        """
        ...

    def poll(self) -> list[Notice]:
        """What has arrived since the last call. Never waits."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer; nothing where it is not known."""
        ...

    def close(self) -> None:
        """Give the pools back to their owner. Nothing may be under way."""
        ...


def checked_pools(pools: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The pools as flat bytes. Raises `ValueError` where one is not contiguous: its offsets would mean nothing."""
    broken = [pool for pool, tensor in pools.items() if not tensor.is_contiguous()]
    if broken:
        raise ValueError(f"pools {broken} are not contiguous")
    return {pool: flat_bytes(tensor) for pool, tensor in pools.items()}


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, [bytes]."""
    return tensor.view(-1).view(torch.uint8)
