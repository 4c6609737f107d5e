"""The members of a torch.distributed group, and how to find which of them are missing after a failure.

gloo reports "connection closed by peer" without the peer's rank. Each rank therefore registers its process when the group is
created. After a failure the survivors look for ended processes on their own host, and use the store to find out which ranks of
other hosts still answer.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

from actors.groups.group import GroupError
from actors.groups.liveness import ProcessId

_ANSWER_S = 1.0
"""Time that survivors have to answer, in seconds."""
_POLL_S = 0.02


class StoreMembers:
    """The members of one group, by group rank."""

    def __init__(self, store: Store, rank: int, size: int, title: str, timeout: timedelta) -> None:
        """Register this rank and wait for all others. Raises `GroupError` if they do not join in time."""
        self._store = store
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]
        began = time.monotonic()
        try:
            store.set(f"member/{rank}", str(ProcessId.current()))
            store.wait([f"member/{peer}" for peer in self._peers], timeout)
            self._processes = {peer: self._read(peer) for peer in self._peers}
        except RuntimeError as error:
            waited_s = time.monotonic() - began
            raise GroupError(f"{title}: waited {waited_s:.1f} s for {self._absent()} to join: {error}") from error

    def missing(self) -> str:
        """Return, after a failure, a text for an error message that names the ranks that have died or do not answer. All
        survivors must call it; it takes up to one second, and never raises."""
        deadline = time.monotonic() + _ANSWER_S
        silent = self._peers
        while time.monotonic() < deadline:
            dead = [peer for peer in self._peers if self._processes[peer].has_ended()]
            if dead:
                return "; ".join(f"rank {peer} (pid {self._processes[peer].pid}) has died" for peer in dead)
            try:
                self._store.set(f"survivor/{self._rank}", "here")
                silent = [peer for peer in silent if not self._store.check([f"survivor/{peer}"])]
            except RuntimeError:
                return "the rank that serves the rendezvous store has died"
            if not silent:
                return "every rank still runs and has failed too"
            time.sleep(_POLL_S)
        return f"no answer from ranks {silent} within {_ANSWER_S:.0f} s"

    def _read(self, peer: int) -> ProcessId:
        return ProcessId.parse(bytes(self._store.get(f"member/{peer}")).decode())

    def _absent(self) -> str:
        try:
            return f"ranks {[peer for peer in self._peers if not self._store.check([f'member/{peer}'])]}"
        except RuntimeError:
            return "the rank that serves the rendezvous store"
