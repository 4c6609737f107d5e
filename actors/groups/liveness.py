"""Liveness of a peer's process, read from /proc, so that a killed peer is noticed long before any deadline."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

_ENDED = ("Z", "X")
"""States of a process that has ended but has not been reaped by its parent."""


@cache
def pid_space() -> str:
    """Return the name of the space in which this process's ids are valid: this boot of this host, and this container's pid
    namespace. Raises `OSError` where there is no Linux /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


@dataclass(frozen=True)
class ProcessId:
    """A unique identity of a process: its id may be reused later, but not with the same start time."""

    space: str
    pid: int
    started: int
    """Start time in clock ticks since boot."""

    @classmethod
    def current(cls) -> Self:
        """Return the identity of the calling process. Raises `OSError` where there is no Linux /proc."""
        pid = os.getpid()
        return cls(pid_space(), pid, _started(pid) or 0)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the identity from `text`, as ``str()`` writes it. Raises `ValueError` if the text has another form."""
        space, pid, started = text.rsplit("-", 2)
        return cls(space, int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.space}-{self.pid}-{self.started}"

    def has_ended(self) -> bool:
        """Whether the process is known to have ended (a zombie counts as ended); False if it runs, or if its host or container
        is not this one, so that this process cannot see it."""
        return self.space == pid_space() and _started(self.pid) != self.started


def _started(pid: int) -> int | None:
    """Return the start time of a running process, or None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in brackets, may itself contain brackets and spaces: the other fields follow the last bracket.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in _ENDED else int(fields[19])
