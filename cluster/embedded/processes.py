"""The processes below this one, and their end by force."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_END_S = 10.0


def descendants() -> list[int]:
    """Returns the ids of the running descendants of this process."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended since it was listed
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    below, found = {os.getpid()}, []
    while more := [pid for pid, parent in parents.items() if parent in below and pid not in below]:
        below.update(more)
        found += more
    return found


def end_descendants(spared: Collection[int] = ()) -> bool:
    """Kill all descendants of this process (SIGKILL) except the `spared` ids, and wait until they have ended, at most 10 s.
    Returns whether none is left."""
    deadline = time.monotonic() + _END_S
    while (found := [pid for pid in descendants() if pid not in spared]) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return not found
