"""Is a peer's process still there? Answered from /proc, so a killed peer is noticed long before any deadline."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

_ENDED = ("Z", "X")
"""States of a process that has ended but whose parent has not collected it yet."""


@cache
def pid_space() -> str:
    """Names the space in which process ids of this process mean something: this boot of this host, this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


@dataclass(frozen=True)
class ProcessId:
    """A process for good: its id may be given to another process later, but not with the same start time."""

    space: str
    pid: int
    started: int
    """Start time in clock ticks since boot."""

    @classmethod
    def current(cls) -> Self:
        """The calling process."""
        pid = os.getpid()
        return cls(pid_space(), pid, _started(pid) or 0)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str()``. Raises `ValueError`."""
        space, pid, started = text.rsplit("-", 2)
        return cls(space, int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.space}-{self.pid}-{self.started}"

    def has_ended(self) -> bool:
        """True if the process is known to have ended; False if it runs or lives where this process cannot look."""
        return self.space == pid_space() and _started(self.pid) != self.started


def _started(pid: int) -> int | None:
    """Start time of a running process, None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in brackets, may itself hold brackets and spaces: read on after the last one.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in _ENDED else int(fields[19])
