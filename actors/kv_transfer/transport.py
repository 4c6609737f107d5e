"""The KV transport interface: one-sided writes from this process's memory into the registered memory of another process.

    writer                                        reader
                                    register ←─── its pools (one tensor per layer)
    connect(description)  ←─────────── describe
    write(peer, ranges, tag)  ══ bytes ══════→    memory it has reserved before
                              ── tag ────────→    poll: the bytes have arrived (data always precedes the tag)

A pool is identified by the number of its layer, or by `STAGING`. `actors.kv_transfer.local` implements the interface within one
process, for tests, and `actors.kv_transfer.nixl_transport` between processes and hosts.
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
"""The pool of the staging buffer, through which small slices are sent (`actors.kv_transfer.staging`)."""


class TransferError(RuntimeError):
    """Raised when a transfer cannot be started or completed. The message names the peer and the transfer."""


@dataclass(frozen=True)
class Ranges:
    """Runs of bytes to move, [runs, 5]: pool and offset on the writer's side, pool and offset on the peer's side, length."""

    table: NDArray[np.int64]

    @classmethod
    def single(cls, pool: int, offset: int, peer_pool: int, peer_offset: int, length: int) -> Ranges:
        """Returns ranges of one run: `length` bytes from byte `offset` of the writer's `pool` to byte `peer_offset` of
        `peer_pool`."""
        return cls(np.array([[pool, offset, peer_pool, peer_offset, length]], np.int64))

    def __len__(self) -> int:
        return len(self.table)

    @property
    def num_bytes(self) -> int:
        """Total length of all runs in bytes."""
        return int(self.table[:, 4].sum())

    def check(self, own: Mapping[int, int], peers: Mapping[int, int]) -> None:
        """Raises `ValueError` unless every run lies inside a registered pool on both sides. `own` and `peers` map the writer's
        and the peer's pools to their sizes in bytes.

        A write past the end of a pool would overwrite unrelated memory.
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
    """The notification that the bytes of a peer's write have arrived, with the tag that the peer gave it."""

    peer: str
    tag: bytes


class Transfer(Protocol):
    """A write in progress. The writer's bytes must not change until it is done."""

    def is_done(self) -> bool:
        """Returns whether the bytes have arrived at the peer, without waiting. Raises `TransferError` if the write has
        failed."""
        ...


class Transport(Protocol):
    """The transport endpoint of one process. Not thread-safe."""

    bytes_sent: int
    """Payload bytes of all writes so far."""

    def register(self, pools: Mapping[int, Tensor]) -> None:
        """Register contiguous tensors as pools, by pool number: a layer, or `STAGING`. Called once, before `describe`; the
        tensors must keep their memory. Raises `ValueError` if one is not contiguous."""
        ...

    def describe(self) -> bytes:
        """Returns the packed description that a peer passes to its `connect` in order to write to this process's pools."""
        ...

    def connect(self, description: bytes) -> str:
        """Connect to the peer whose `describe` returned `description`, and return its name. A new connection replaces an
        earlier one.

        Raises `TransferError` if the peer cannot be reached or its description cannot be read.
        """
        ...

    def write(self, peer: str, ranges: Ranges, tag: bytes) -> Transfer:
        """Begin to write bytes of this process's pools into the pools of `peer`, a name that `connect` returned, and return the
        write in progress. The peer receives `tag` once all bytes have arrived.

        Without ranges only the tag is sent. Raises `ValueError` for ranges outside the pools, and `TransferError` if the peer
        is not connected or the write cannot begin.
        """
        ...

    def poll(self) -> list[Notice]:
        """Returns the notices of the peers' writes that have arrived here since the last call. Never blocks."""
        ...

    def disconnect(self, peer: str) -> None:
        """Disconnect from the peer of this name, which ends the writes to it; does nothing if it is not connected."""
        ...

    def close(self) -> None:
        """Deregister the pools and disconnect all peers. No transfer may be in progress."""
        ...


def checked_pools(pools: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Returns the pools as views of flat bytes, [bytes] uint8, by pool number. Raises `ValueError` if one is not contiguous,
    since byte offsets require contiguity."""
    broken = [pool for pool, tensor in pools.items() if not tensor.is_contiguous()]
    if broken:
        raise ValueError(f"pools {broken} are not contiguous")
    return {pool: flat_bytes(tensor) for pool, tensor in pools.items()}


def flat_bytes(tensor: Tensor) -> Tensor:
    """Returns a view of the memory of a contiguous tensor, [bytes] uint8."""
    return tensor.view(-1).view(torch.uint8)
