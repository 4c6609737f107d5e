"""Steps: how the ranks of a shared-memory group exchange data, one slot at a time.

In a step each rank writes its slot, sets its own counter to the number of the step, waits until every other counter has reached
that number, and then reads what it needs from the slots::

    rank 0   write slot 0 . counter 7 ... wait ... read slots 0 1
    rank 1        write slot 1 . counter 7 . wait . read slots 0 1

Each rank has two slots, for even and odd steps, and no other signal is needed: a rank whose counter is 8 has finished reading
step 7, and a slot is written again only in step 9, after every rank has reached step 8.

The counters are plain 8-byte stores after the data. Other processors see them in that order only where stores are not reordered
with stores nor loads with loads: on x86-64. (memcpy fences the streaming stores it uses for large copies.)
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from actors.groups.shared_memory.members import SegmentMembers
from actors.groups.shared_memory.segment import Geometry
from actors.groups.shared_memory.waiting import GaveUpError, wait_for

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_CODES = {operation: code for code, operation in enumerate(OPERATIONS)}
_MOST_SHAPES = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16,
           torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)  # fmt: skip
DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}

Slot = dict[torch.dtype, Tensor]
"""The same bytes viewed as ``[elements]`` of each dtype."""


class SlotExchange:
    """One rank's view of the slots and counters of its group."""

    def __init__(
        self, memory: mmap.mmap, words: memoryview, geometry: Geometry, rank: int, members: SegmentMembers, timeout_s: float
    ) -> None:
        ranks = range(geometry.size)
        self._words = words
        self._rank = rank
        self._members = members
        self._timeout_s = timeout_s
        self._step = 0
        self._peers = [peer for peer in ranks if peer != rank]
        self._counters = [geometry.rank_block(peer) // 8 for peer in ranks]
        self._headers = [[geometry.slot_header(peer, parity) // 8 for peer in ranks] for parity in (0, 1)]
        self._shaped: dict[tuple[torch.dtype, torch.Size], list[list[Tensor]]] = {}
        self._slots = [
            [_map_slot(memory, geometry.slot(peer, parity), geometry.slot_bytes) for peer in ranks] for parity in (0, 1)
        ]

    def begin(self) -> list[Slot]:
        """Start the next step and return the slots of all ranks, in rank order. Write this rank's slot, call `finish`, then
        read the others."""
        self._step += 1
        return self._slots[self._step & 1]

    def begin_shaped(self, like: Tensor) -> list[Tensor]:
        """Start the next step as `begin` does, and return the start of every rank's slot as a tensor with the shape and dtype
        of `like`, which must fit in a slot.

        The views are cached, because shapes recur.
        """
        self._step += 1
        key = (like.dtype, like.shape)
        if key not in self._shaped:
            if len(self._shaped) == _MOST_SHAPES:
                self._shaped.clear()
            count = like.numel()
            self._shaped[key] = [[slot[like.dtype][:count].view(like.shape) for slot in slots] for slots in self._slots]
        return self._shaped[key][self._step & 1]

    def finish(self, operation: str, dtype: torch.dtype, count: int) -> None:
        """Publish this rank's slot and wait for those of the others. All ranks must call it with the same `operation` (one of
        `OPERATIONS`), `dtype` and element `count`.

        Raises `GaveUpError` if a rank has died or left, does not come within the timeout, or calls it with other arguments.
        """
        words, step = self._words, self._step
        headers = self._headers[step & 1]
        signature = _CODES[operation] << 56 | DTYPE_CODES[dtype] << 48 | count
        words[headers[self._rank]] = signature
        words[self._counters[self._rank]] = step
        for peer in self._peers:
            if words[self._counters[peer]] < step:
                wait_for(words, self._counters[peer], step, self._look_round)
            if words[headers[peer]] != signature:
                raise GaveUpError(f"rank {peer} is in {_describe(words[headers[peer]])}, this rank in {_describe(signature)}")

    def publish_splits(self, splits: Sequence[int]) -> None:
        """Publish `splits`, the number of rows that this rank sends to each rank, in rank order. Call it between `begin` and
        `finish`."""
        first = self._headers[self._step & 1][self._rank] + 1
        for index, rows in enumerate(splits):
            self._words[first + index] = rows

    def splits(self) -> list[list[int]]:
        """Return the splits that each rank has published in this step (`publish_splits`), in rank order. Call it after
        `finish`."""
        size = len(self._counters)
        return [self._words[first + 1 : first + 1 + size].tolist() for first in self._headers[self._step & 1]]

    def _look_round(self, waited_s: float) -> str | None:
        missing = [peer for peer in self._peers if self._words[self._counters[peer]] < self._step]
        lost = [why for peer in missing if (why := self._members.lost(peer))]
        if lost or (missing and waited_s > self._timeout_s):
            return f"waited {waited_s:.1f} s for ranks {missing}: {'; '.join(lost) or 'they run but did not come'}"
        return None


def _map_slot(memory: mmap.mmap, offset: int, num_bytes: int) -> Slot:
    count = {dtype: num_bytes // dtype.itemsize for dtype in _DTYPES}
    return {dtype: torch.frombuffer(memory, dtype=dtype, count=count[dtype], offset=offset) for dtype in _DTYPES}


def _describe(signature: int) -> str:
    operation, dtype, count = signature >> 56, signature >> 48 & 0xFF, signature & (1 << 48) - 1
    return f"{OPERATIONS[operation]} of {count} elements of {_DTYPES[dtype]}"
