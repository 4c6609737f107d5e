"""Membership of a shared-memory group: how its processes find each other by name, and detect members that have died.

Rank 0 creates the file, and the others look for it. When every rank has attached, rank 0 removes the name: from then on the
memory lives exactly as long as the processes that map it.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from actors.groups.group import GroupError
from actors.groups.liveness import ProcessId, pid_space
from actors.groups.shared_memory import segment
from actors.groups.shared_memory.segment import LINE_BYTES, Geometry

_POLL_S = 0.002
ABSENT, ATTACHED, CLOSED, FAILED = range(4)
"""The states that a rank publishes."""


class SegmentMembers:
    """The state of every rank of a group, stored in the segment. A rank writes its own entry and reads the others."""

    def __init__(self, words: memoryview, geometry: Geometry, rank: int) -> None:
        self._words = words
        self._rank = rank
        self._first = [(geometry.rank_block(peer) + LINE_BYTES) // 8 for peer in range(geometry.size)]

    def enter(self) -> None:
        """Register the calling process in the segment as this rank, attached."""
        process, first = ProcessId.current(), self._first[self._rank]
        self._words[first + 1] = process.pid
        self._words[first + 2] = process.started
        self._words[first] = ATTACHED

    def leave(self, state: int) -> None:
        """Publish that this rank no longer responds: `state` is `CLOSED` or `FAILED`. Only the first call after `enter` has an
        effect."""
        if self._words[self._first[self._rank]] == ATTACHED:
            self._words[self._first[self._rank]] = state

    def process(self, rank: int) -> ProcessId:
        """Return the process of group rank `rank`, which must have attached."""
        first = self._first[rank]
        return ProcessId(pid_space(), self._words[first + 1], self._words[first + 2])

    def absent(self) -> list[int]:
        """Return the group ranks that have not attached yet, ascending."""
        return [rank for rank, first in enumerate(self._first) if self._words[first] == ABSENT]

    def lost(self, rank: int) -> str | None:
        """Return why group rank `rank` will not respond any more (it has died, failed or closed the group), as a text that
        names it; None if it may respond, or has not attached yet."""
        state = self._words[self._first[rank]]
        if state == ABSENT:
            return None
        if self.process(rank).has_ended() and state != CLOSED:
            return f"rank {rank} (pid {self.process(rank).pid}) has died"
        return {CLOSED: f"rank {rank} has closed the group", FAILED: f"rank {rank} has failed"}.get(state)

    def all_lost(self) -> list[str]:
        """Return a text as that of `lost` for each rank that will not respond any more, in rank order."""
        return [why for rank in range(len(self._first)) if (why := self.lost(rank))]


def attach(
    name: str, rank: int, geometry: Geometry, title: str, timeout_s: float
) -> tuple[mmap.mmap, memoryview, SegmentMembers]:
    """Map the shared memory of the group `name` as its rank `rank`, and wait until all ranks have mapped it. Rank 0 creates it.

    `geometry` must be equal on all ranks; `title` begins the error messages. Returns the memory, the same memory as 64-bit
    words, and its members. Raises `GroupError` if not all ranks attach within `timeout_s` (naming them), one dies meanwhile, or
    the segment cannot be created or mapped (`create`, `map_existing`).
    """
    began = time.monotonic()
    if rank == 0:
        path, memory = segment.create(name, geometry)
    else:
        path, memory = _find(name, geometry, title, began + timeout_s)
    words = memoryview(memory).cast("Q")
    members = SegmentMembers(words, geometry, rank)
    members.enter()
    complete: Callable[[], bool]
    try:
        complete = (lambda: not members.absent()) if rank == 0 else (lambda: bool(words[0]))
        _wait_until(complete, members, segment.maker(path), title, began, timeout_s)
    except BaseException:
        members.leave(FAILED)
        path.unlink(missing_ok=True)
        raise
    if rank == 0:
        path.unlink()
        words[0] = 1
    return memory, words, members


def _find(name: str, geometry: Geometry, title: str, deadline: float) -> tuple[Path, mmap.mmap]:
    while time.monotonic() < deadline:
        path = segment.find(name)
        if path is not None:
            try:
                return path, segment.map_existing(path, geometry)
            except FileNotFoundError:
                pass
        time.sleep(_POLL_S)
    raise GroupError(f"{title}: rank 0 did not make the group {name!r} in {segment.DIRECTORY} in time")


def _wait_until(
    complete: Callable[[], bool], members: SegmentMembers, maker: ProcessId, title: str, began: float, timeout_s: float
) -> None:
    """Wait until the group is complete.

    Rank 0 waits for the others to attach. They wait for rank 0 to set the first word of the segment, which means that the
    file's name is gone.
    """
    while not complete():
        waited_s = time.monotonic() - began
        lost = members.all_lost()
        # The creator may die between creating the file and registering itself as a member.
        if maker.has_ended() and not lost:
            lost = [f"rank 0 (pid {maker.pid}) has died"]
        if lost and not complete():
            _refuse(title, f"{'; '.join(lost)} while the group was made")
        if waited_s > timeout_s:
            _refuse(title, f"waited {waited_s:.1f} s for ranks {members.absent()} to attach")
        time.sleep(_POLL_S)


def _refuse(title: str, problem: str) -> NoReturn:
    raise GroupError(f"{title}: {problem}")
