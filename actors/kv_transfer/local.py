"""A KV `Transport` inside one process, for ranks that run as threads and for tests."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from torch import Tensor

from actors.kv_transfer.transport import Notice, Ranges, TransferError, checked_pools


class Switchboard:
    """Connects the local transports of a process by name. Any thread may write.

    With ``held=True`` nothing arrives before `deliver` is called, so that a test can inspect a transfer in progress.
    """

    def __init__(self, held: bool = False) -> None:
        self.held = held
        self.transports: dict[str, LocalTransport] = {}
        self._waiting: list[LocalTransfer] = []
        self._lock = Lock()

    def begin(self, transfer: LocalTransfer) -> None:
        """Queue a transfer, and deliver it at once unless the switchboard is held."""
        with self._lock:
            self._waiting.append(transfer)
        if not self.held:
            self.deliver()

    def deliver(self, count: int | None = None) -> int:
        """Deliver the first `count` queued transfers (all if None) in the order in which they began. Returns the number
        delivered."""
        with self._lock:
            now, self._waiting = self._waiting[:count], self._waiting[len(self._waiting[:count]) :]
        for transfer in now:
            transfer.arrive()
        return len(now)


class LocalTransfer:
    """A write to another transport of the switchboard. It fails if that transport is closed before the delivery."""

    def __init__(self, writer: LocalTransport, peer: str, ranges: Ranges, tag: bytes) -> None:
        self._writer, self._peer, self._ranges, self._tag = writer, peer, ranges, tag
        self._state = "moving"

    def arrive(self) -> None:
        """Copy the bytes into the peer's pools and notify it; the transfer is lost if the peer is closed or disconnected."""
        reader = self._writer.board.transports.get(self._peer)
        if reader is None or not self._writer.knows(self._peer):
            self._state = "lost"
            return
        for pool, offset, peer_pool, peer_offset, length in self._ranges.table.tolist():
            reader.pools[peer_pool][peer_offset : peer_offset + length] = self._writer.pools[pool][offset : offset + length]
        reader.notify(Notice(self._writer.name, self._tag))
        self._state = "done"

    def is_done(self) -> bool:
        """See `Transfer.is_done`. It is done once the switchboard has delivered it."""
        if self._state == "lost":
            raise TransferError(
                f"peer {self._peer} closed before {self._ranges.num_bytes:,} bytes from {self._writer.name} arrived"
            )
        return self._state == "done"


class LocalTransport:
    """The `Transport` of one rank on a switchboard."""

    def __init__(self, board: Switchboard, name: str) -> None:
        if name in board.transports:
            raise ValueError(f"there is a transport {name!r} on this switchboard already")
        self.board, self.name, self.bytes_sent = board, name, 0
        self.pools: dict[int, Tensor] = {}
        self._peers: set[str] = set()
        self._notices: list[Notice] = []
        self._lock = Lock()
        board.transports[name] = self

    def register(self, pools: Mapping[int, Tensor]) -> None:
        """See `Transport.register`."""
        self.pools = checked_pools(pools)

    def describe(self) -> bytes:
        """See `Transport.describe`. The description is the transport's name."""
        return self.name.encode()

    def connect(self, description: bytes) -> str:
        """See `Transport.connect`."""
        name = description.decode("utf-8", "replace")
        if name not in self.board.transports:
            raise TransferError(f"there is no transport {name!r}: there are {sorted(self.board.transports)}")
        self._peers.add(name)
        return name

    def write(self, peer: str, ranges: Ranges, tag: bytes) -> LocalTransfer:
        """See `Transport.write`. The bytes arrive before it returns, unless the switchboard is held."""
        if peer not in self._peers or peer not in self.board.transports:
            raise TransferError(f"{self.name} is not connected to {peer!r}, only to {sorted(self._peers)}")
        ranges.check(_sizes(self.pools), _sizes(self.board.transports[peer].pools))
        self.bytes_sent += ranges.num_bytes
        transfer = LocalTransfer(self, peer, ranges, tag)
        self.board.begin(transfer)
        return transfer

    def knows(self, peer: str) -> bool:
        """Returns whether this transport is connected to the transport named `peer`."""
        return peer in self._peers

    def notify(self, notice: Notice) -> None:
        """Queue a notice for `poll`. May be called from any thread; the writer's calls it."""
        with self._lock:
            self._notices.append(notice)

    def poll(self) -> list[Notice]:
        """See `Transport.poll`."""
        with self._lock:
            found, self._notices = self._notices, []
        return found

    def disconnect(self, peer: str) -> None:
        """See `Transport.disconnect`. Transfers to the peer that are not delivered yet are lost."""
        self._peers.discard(peer)

    def close(self) -> None:
        """See `Transport.close`. Its name becomes free, and transfers to it that are not delivered yet are lost."""
        self.board.transports.pop(self.name, None)
        self._peers.clear()


def _sizes(pools: Mapping[int, Tensor]) -> dict[int, int]:
    return {pool: memory.numel() for pool, memory in pools.items()}
