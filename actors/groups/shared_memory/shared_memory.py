"""A group of processes on one host that communicate through shared memory. CPU tensors only.

Collectives are made of steps (`slot_exchange.py`), point-to-point messages go through one ring per pair (`mailbox.py`), and the
processes find each other by a name (`members.py`). Only x86-64 guarantees the memory order that this needs: elsewhere
`shared_memory_works` returns False, and gloo is used.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor

from actors.groups.base import DEFAULT_TIMEOUT_S, CountedGroup
from actors.groups.group import GroupError
from actors.groups.reduction import sum_in_rank_order
from actors.groups.shared_memory.mailbox import Inbox, Outbox
from actors.groups.shared_memory.members import CLOSED, FAILED, attach
from actors.groups.shared_memory.segment import DIRECTORY, LINE_BYTES, MAX_RANKS, Geometry
from actors.groups.shared_memory.slot_exchange import DTYPE_CODES, Slot, SlotExchange
from actors.groups.shared_memory.waiting import GaveUpError, LookRound

SLOT_BYTES = 1 << 20
"""Size of a slot; larger tensors take several steps. The slots of all ranks should stay in the processor's cache."""
_RINGS_BYTES = 4 << 20
"""Size of all outgoing mailboxes of a rank together."""
_DRAIN_S = 5.0
_GATHER_BYTES = 64 * 1024
"""Up to this size, three or more ranks all-reduce in one step, in which each sums everything; above it, each sums its 1/n."""


def shared_memory_works() -> bool:
    """Whether this machine can run `SharedMemoryGroup`: Linux on x86-64 with /dev/shm."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and DIRECTORY.is_dir()


class SharedMemoryGroup(CountedGroup):
    """One rank of a group of processes on one host, created with `attach` by all members at the same time."""

    def __init__(self, name: str, rank: int, size: int, axis: str, timeout_s: float, slot_bytes: int) -> None:
        super().__init__(rank, size, axis, timeout_s)
        ring_bytes = _RINGS_BYTES // max(1, size - 1) // LINE_BYTES * LINE_BYTES
        geometry = Geometry(size, slot_bytes, ring_bytes)
        title = f"{axis} group {name!r}, rank {rank} of {size}"
        memory, words, self._members = attach(name, rank, geometry, title, timeout_s)
        self._slot_bytes = slot_bytes
        self._section_bytes = slot_bytes // size // LINE_BYTES * LINE_BYTES
        self._at_once_bytes = slot_bytes if size == 2 else min(slot_bytes, _GATHER_BYTES)
        self._peers = [peer for peer in range(size) if peer != rank]
        self._exchange: SlotExchange | None = SlotExchange(memory, words, geometry, rank, self._members, timeout_s)
        self._outboxes = {peer: Outbox(memory, words, geometry, rank, peer) for peer in self._peers}
        self._inboxes = {
            peer: Inbox(memory, words, geometry, peer, rank, self._members.process(peer).pid) for peer in self._peers
        }

    @classmethod
    def attach(
        cls,
        name: str,
        rank: int,
        size: int,
        axis: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        slot_bytes: int = SLOT_BYTES,
    ) -> SharedMemoryGroup:
        """Join the group `name` as its rank `rank`, and return when every rank has joined. `axis` is used in messages;
        `timeout_s` limits joining and each later operation.

        No other group that is being created on this host may have the same name: include the engine and its generation.
        `slot_bytes`, the size of the buffer of one rank, must be equal on all ranks. Raises `GroupError` if a rank does not
        join in time or dies (naming it), if this machine lacks support (`shared_memory_works`), /dev/shm is too small or the
        name is malformed, there are more than 63 ranks, or `slot_bytes` is not a multiple of 4096 of at least 64 a rank.
        """
        if not shared_memory_works():
            raise GroupError(f"shared memory between ranks needs Linux on x86-64, not {platform.machine()}; use gloo")
        if size > MAX_RANKS or slot_bytes % 4096 or slot_bytes < LINE_BYTES * size:
            raise GroupError(
                f"a shared-memory group has at most {MAX_RANKS} ranks, not {size}, and slots of a multiple of 4096 bytes "
                f"with {LINE_BYTES} per rank, not {slot_bytes}"
            )
        return cls(name, rank, size, axis, timeout_s, slot_bytes)

    def close(self) -> None:
        """See `Group.close`. Messages in the rings can still be received afterwards. A message too large for its ring exists in
        this process only, so closing waits for its receiver, at most 5 s or the group's timeout."""
        try:
            for to, outbox in self._outboxes.items():
                outbox.drain(self._look_at(to, min(self.timeout_s, _DRAIN_S)))
        except GaveUpError:
            pass  # The receiver is gone or busy; it will find that this rank has closed.
        self._leave(CLOSED)

    def _all_reduce(self, x: Tensor) -> Tensor:
        if x.nbytes <= self._at_once_bytes:
            return self._sum_at_once(x)
        flat = x.reshape(-1)
        if self.size > 2:
            sizes = [len(part) for part in torch.tensor_split(flat, self.size)]
            return self._gather("all_reduce", self._scatter_sum("all_reduce", flat, sizes), sizes).view(x.shape)
        out = torch.empty_like(flat)
        chunk = self._slot_bytes // x.itemsize
        for at in range(0, len(flat), chunk):
            out[at : at + chunk] = self._sum_at_once(flat[at : at + chunk])
        return out.view(x.shape)

    def _sum_at_once(self, x: Tensor) -> Tensor:
        """Return the sum of tensors that fit in a slot, in one step. A layer waits for two of these sums, so the code does
        little else."""
        exchange = self._open("all_reduce")
        try:
            shown = exchange.begin_shaped(x)
            shown[self.rank].copy_(x)
            exchange.finish("all_reduce", x.dtype, x.numel())
        except GaveUpError as error:
            self._give_up("all_reduce", error)
        return sum_in_rank_order([*shown[: self.rank], x, *shown[self.rank + 1 :]])

    def _all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return self._gather("all_gather", x, sizes)

    def _gather(self, operation: str, x: Tensor, sizes: Sequence[int]) -> Tensor:
        out = x.new_empty(sum(sizes), *x.shape[1:])
        targets = [part.view(-1) for part in torch.split(out, list(sizes))]
        flat = x.reshape(-1)
        targets[self.rank].copy_(flat)
        chunk = self._slot_bytes // x.itemsize
        with self._operation(operation) as exchange:
            for at in range(0, max(len(target) for target in targets), chunk):
                slots = exchange.begin()
                own = flat[at : at + chunk]
                slots[self.rank][x.dtype][: len(own)].copy_(own)
                exchange.finish(operation, x.dtype, out.numel())
                for peer in self._peers:
                    target = targets[peer][at : at + chunk]
                    target.copy_(slots[peer][x.dtype][: len(target)])
        return out

    def _reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return self._scatter_sum("reduce_scatter", x, sizes)

    def _scatter_sum(self, operation: str, x: Tensor, sizes: Sequence[int]) -> Tensor:
        parts = [part.reshape(-1) for part in torch.split(x, list(sizes))]
        out = x.new_empty(sizes[self.rank], *x.shape[1:])
        flat_out, mine = out.view(-1), parts[self.rank]
        section = self._section_bytes // x.itemsize
        with self._operation(operation) as exchange:
            for at in range(0, max(len(part) for part in parts), section):
                slots = exchange.begin()
                self._write_parts(slots[self.rank], parts, at)
                exchange.finish(operation, x.dtype, x.numel())
                own = mine[at : at + section]
                terms = [own if rank == self.rank else self._section(slots[rank], own) for rank in range(self.size)]
                sum_in_rank_order(terms, out=flat_out[at : at + section])
        return out

    def _all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        parts = [part.reshape(-1) for part in torch.split(x, list(send))]
        out = x.new_empty(sum(receive), *x.shape[1:])
        targets = [part.view(-1) for part in torch.split(out, list(receive))]
        targets[self.rank].copy_(parts[self.rank])
        section = self._section_bytes // x.itemsize
        at, longest = 0, 1
        with self._operation("all_to_all") as exchange:
            while at < longest:
                slots = exchange.begin()
                exchange.publish_splits(send)
                self._write_parts(slots[self.rank], parts, at)
                exchange.finish("all_to_all", x.dtype, x.shape[1:].numel())
                if at == 0:
                    longest = _longest_part(exchange.splits(), receive, self.rank) * x.shape[1:].numel()
                for peer in self._peers:
                    target = targets[peer][at : at + section]
                    target.copy_(self._section(slots[peer], target))
                at += section
        return out

    def _barrier(self) -> None:
        with self._operation("barrier") as exchange:
            exchange.begin()
            exchange.finish("barrier", torch.uint8, 0)

    def _send(self, x: Tensor, to: int) -> None:
        data = x.contiguous().view(-1).view(torch.uint8)
        with self._operation(f"send to rank {to}"):
            self._outboxes[to].put(data, DTYPE_CODES[x.dtype], self._look_at(to))

    def _recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
        out = torch.empty(shape, dtype=dtype)
        with self._operation(f"recv from rank {source}"):
            self._inboxes[source].take(out.view(-1).view(torch.uint8), DTYPE_CODES[dtype], self._look_at(source))
        return out

    def _write_parts(self, slot: Slot, parts: Sequence[Tensor], at: int) -> None:
        """Write to each peer's section the elements of its part from `at` on, as many as a section holds."""
        section = self._section_bytes // parts[0].itemsize
        elements = slot[parts[0].dtype]
        for peer in self._peers:
            piece = parts[peer][at : at + section]
            elements[peer * section : peer * section + len(piece)].copy_(piece)

    def _section(self, slot: Slot, like: Tensor) -> Tensor:
        """Return what a peer has written to this rank's section, as many elements as `like` has."""
        start = self.rank * (self._section_bytes // like.itemsize)
        return slot[like.dtype][start : start + len(like)]

    def _look_at(self, peer: int, timeout_s: float | None = None) -> LookRound:
        limit_s = self.timeout_s if timeout_s is None else timeout_s

        def look_round(waited_s: float) -> str | None:
            why = self._members.lost(peer)
            if why or waited_s > limit_s:
                return f"waited {waited_s:.1f} s: {why or f'rank {peer} runs but did not answer'}"
            return None

        return look_round

    @contextmanager
    def _operation(self, operation: str) -> Iterator[SlotExchange]:
        """Convert a wait that was given up into a `GroupError` about `operation`, after which the group is closed."""
        exchange = self._open(operation)
        try:
            yield exchange
        except GaveUpError as error:
            self._give_up(operation, error)

    def _open(self, operation: str) -> SlotExchange:
        if self._exchange is None:
            self._refuse(operation, "this group is closed (by `close`, or by an earlier failure)")
        return self._exchange

    def _give_up(self, operation: str, error: GaveUpError) -> NoReturn:
        self._leave(FAILED)
        self._refuse(operation, str(error))

    def _leave(self, state: int) -> None:
        if self._exchange is not None:
            self._members.leave(state)
            for outbox in self._outboxes.values():
                outbox.close()
            self._exchange = None
            self._outboxes, self._inboxes = {}, {}


def _longest_part(splits: Sequence[Sequence[int]], receive: Sequence[int], rank: int) -> int:
    """Return the rows of the longest part that any rank sends to another. Raises `GaveUpError` if this rank expects other
    numbers."""
    sent_here = [row[rank] for row in splits]
    if sent_here != list(receive):
        raise GaveUpError(f"receive={list(receive)} but the ranks sent {sent_here} rows")
    return max(rows for source, row in enumerate(splits) for to, rows in enumerate(row) if source != to or len(splits) == 1)
