"""Point-to-point messages (send/recv) between two ranks in shared memory: a ring buffer, and a list of message records.

    ring     |....[message 7][message 8]........|      head moves right, wraps; a message is never split
    records  | 7: at 4, 16 bytes | 8: at 20, ... |     `sent` counts records written, `taken` those read

The sender never waits for space in the ring: a message that does not fit is written to an anonymous file of its own
(`memfd_create`), which the receiver opens through /proc and which disappears with its sender. The sender waits only when the
receiver is 64 messages behind.
"""

from __future__ import annotations

import mmap
import os
from collections import deque

import torch
from torch import Tensor

from actors.groups.shared_memory.segment import LINE_BYTES, RECORD_BYTES, RECORDS, Geometry
from actors.groups.shared_memory.waiting import GaveUpError, LookRound, wait_for

_IN_RING, _IN_FILE = 1, 2
_WORD_BYTES = 8


class _Mailbox:
    """The memory that both ends share. `words` is the whole segment as 64-bit words."""

    def __init__(self, memory: mmap.mmap, words: memoryview, geometry: Geometry, source: int, to: int) -> None:
        block = geometry.pair_block(source, to)
        self._words = words
        self._sent_cell = block // _WORD_BYTES
        self._taken_cell = (block + LINE_BYTES) // _WORD_BYTES
        self._first_record = (block + 2 * LINE_BYTES) // _WORD_BYTES
        self._ring_bytes = geometry.ring_bytes
        self._ring = torch.frombuffer(memory, dtype=torch.uint8, count=geometry.ring_bytes, offset=geometry.ring(source, to))

    def _record(self, number: int) -> int:
        return self._first_record + number % RECORDS * (RECORD_BYTES // _WORD_BYTES)


class Outbox(_Mailbox):
    """The sender's end of a mailbox."""

    def __init__(self, memory: mmap.mmap, words: memoryview, geometry: Geometry, source: int, to: int) -> None:
        super().__init__(memory, words, geometry, source, to)
        self._sent = 0
        self._head = 0
        self._under_way: deque[tuple[int, int]] = deque()
        """For each message not taken yet: its start in the unwrapped ring, and its file descriptor (-1: none)."""

    def put(self, data: Tensor, kind: int, look_round: LookRound) -> None:
        """Send `data` (uint8 ``[bytes]``). `kind`, any number below 2**32, must be that with which the receiver takes the
        message.

        Returns without waiting, unless the receiver is 64 messages behind: then raises `GaveUpError` if `look_round` (see
        `wait_for`) gives up the wait. Raises `OSError` if a message that does not fit the ring cannot be written to a file.
        """
        self._forget_taken()
        if len(self._under_way) == RECORDS:
            wait_for(self._words, self._taken_cell, self._sent - RECORDS + 1, look_round)
            self._forget_taken()
        start = self._place(data.numel())
        file = -1 if start is not None else _write_file(data)
        if start is not None:
            offset = start % self._ring_bytes
            self._ring[offset : offset + data.numel()].copy_(data)
            self._head = start + data.numel()
        self._under_way.append((self._head if start is None else start, file))
        record = self._record(self._sent)
        self._words[record] = _IN_RING if start is not None else _IN_FILE
        self._words[record + 1] = data.numel()
        self._words[record + 2] = kind
        self._words[record + 3] = file if start is None else start % self._ring_bytes
        self._sent += 1
        self._words[self._sent_cell] = self._sent

    def drain(self, look_round: LookRound) -> None:
        """Wait until the receiver has taken every message that has a file of its own, because it did not fit the ring. Raises
        `GaveUpError` if `look_round` (see `wait_for`) gives up the wait."""
        self._forget_taken()
        last = max((number for number, (_, file) in enumerate(self._under_way, start=1) if file >= 0), default=0)
        if last:
            wait_for(self._words, self._taken_cell, self._sent - len(self._under_way) + last, look_round)

    def close(self) -> None:
        """Close the files of messages that have not been taken, which discards these; messages in the ring can still be
        received."""
        for _, file in self._under_way:
            if file >= 0:
                os.close(file)
        self._under_way.clear()

    def _place(self, num_bytes: int) -> int | None:
        """Return where the next message starts in the unwrapped ring, or None if there is no space."""
        if not self._under_way:
            # Start again at 0, in memory that is still in the processor's cache.
            self._head = 0
        tail = self._under_way[0][0] if self._under_way else 0
        start = _round_up(self._head)
        if start % self._ring_bytes + num_bytes > self._ring_bytes:
            start += self._ring_bytes - start % self._ring_bytes
        return start if start + num_bytes - tail <= self._ring_bytes else None

    def _forget_taken(self) -> None:
        not_taken = self._sent - self._words[self._taken_cell]
        while len(self._under_way) > not_taken:
            _, file = self._under_way.popleft()
            if file >= 0:
                os.close(file)


class Inbox(_Mailbox):
    """The receiver's end of a mailbox. `sender_pid` is the process that writes to it."""

    def __init__(self, memory: mmap.mmap, words: memoryview, geometry: Geometry, source: int, to: int, sender_pid: int) -> None:
        super().__init__(memory, words, geometry, source, to)
        self._taken = 0
        self._sender_pid = sender_pid

    def take(self, out: Tensor, kind: int, look_round: LookRound) -> None:
        """Receive the next message into `out` (uint8 ``[bytes]``); `kind` must be that with which it was sent.

        Raises `GaveUpError` if `look_round` (see `wait_for`) gives up the wait, if the message has another size or kind, or if
        the sender has ended and its file with it.
        """
        wait_for(self._words, self._sent_cell, self._taken + 1, look_round)
        record = self._record(self._taken)
        place, num_bytes, sent_kind, offset = self._words[record : record + 4]
        if (num_bytes, sent_kind) != (out.numel(), kind):
            raise GaveUpError(
                f"expected {out.numel()} bytes of kind {kind}, the next message has {num_bytes} of kind {sent_kind}"
            )
        if place == _IN_RING:
            out.copy_(self._ring[offset : offset + num_bytes])
        else:
            _read_file(self._sender_pid, offset, out)
        self._taken += 1
        self._words[self._taken_cell] = self._taken


def _write_file(data: Tensor) -> int:
    file = os.memfd_create("shardwright", os.MFD_CLOEXEC)
    rest = data.numpy().data
    while len(rest):
        rest = rest[os.write(file, rest) :]
    return file


def _read_file(sender_pid: int, sender_file: int, out: Tensor) -> None:
    try:
        file = os.open(f"/proc/{sender_pid}/fd/{sender_file}", os.O_RDONLY)
    except OSError as error:
        raise GaveUpError(f"the sender (pid {sender_pid}) went away before its message was taken: {error}") from error
    try:
        rest, at = out.numpy().data, 0
        while len(rest):
            count = os.preadv(file, [rest], at)
            rest, at = rest[count:], at + count
    finally:
        os.close(file)


def _round_up(number: int) -> int:
    return -(-number // LINE_BYTES) * LINE_BYTES
