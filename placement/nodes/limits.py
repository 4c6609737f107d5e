"""The memory and the CPUs that this process may use: those of its machine, or less where a container or a cgroup limits them.

This is the only source of both numbers. A limit may stand anywhere on the path from the process's cgroup to the root, and the
smallest one counts::

    /sys/fs/cgroup          max                     version 2: memory.max, memory.high, cpu.max
    └─ pod                  2 GiB   <- counts       version 1: memory.limit_in_bytes, cpu.cfs_quota_us
       └─ container         max

Version 1 also reports ``hierarchical_memory_limit``, which includes cgroups above those that a container can see.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_MEMORY_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Files with a memory limit in bytes. Above ``memory.high`` a process is not killed, but hardly runs any more."""


@dataclass(frozen=True)
class MemoryLimit:
    """The memory that this process may use, in bytes, and where the number comes from, as text."""

    num_bytes: int
    source: str


def memory_limit(root: Path = _ROOT) -> MemoryLimit:
    """Returns the smaller of the machine's memory and of every cgroup limit that holds for this process.

    `root` is the folder with ``proc`` and ``sys``, for tests. Files that cannot be read count as no limit.
    """
    found = [MemoryLimit(_machine_bytes(root), "the machine's memory")]
    for folder in _cgroups(root, "memory"):
        found += _limits_in(folder)
    return min(found, key=lambda limit: limit.num_bytes)


def cpu_limit(root: Path = _ROOT) -> int:
    """Returns the number of CPUs that this process may use, at least 1: those of its affinity mask (which includes cpusets), or
    the smallest quota of its cgroups, rounded down.

    Rounding down leaves part of a CPU unused; one thread too many would be throttled, and all ranks wait for the slowest.
    `root` is the folder with ``proc`` and ``sys``, for tests.
    """
    quotas = [quota for folder in _cgroups(root, "cpu") if (quota := _quota(folder)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def _machine_bytes(root: Path) -> int:
    """Returns ``MemTotal``, which a container may show reduced, or else the pages of the machine."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits_in(folder: Path) -> Iterator[MemoryLimit]:
    """Yields the memory limits of one cgroup."""
    for name in _MEMORY_FILES:
        text = _read(folder / name).strip()
        if text.isdigit():  # otherwise it is `max`
            yield MemoryLimit(int(text), f"the limit {folder / name} of its cgroup")
    found = re.search(r"^hierarchical_memory_limit (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
    if found:
        yield MemoryLimit(int(found[1]), f"hierarchical_memory_limit in {folder / 'memory.stat'} of its cgroup")


def _quota(folder: Path) -> float | None:
    """Returns the CPUs that the quota of one cgroup allows; None if it has none."""
    both = _read(folder / "cpu.max").split() or [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(both) != 2 or not all(text.isdigit() for text in both) or int(both[1]) == 0:  # `max`, or -1
        return None
    return int(both[0]) / int(both[1])


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of the cgroups that hold for this process, for one controller: its own, and those above up to where
    the hierarchy is mounted."""
    paths = _own_paths(root, controller)
    for line in _read(root / "proc/self/mountinfo").splitlines():
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(), tail.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        name = "" if kind[0] == "cgroup2" else controller if controller in kind[2].split(",") else None
        if not kind[0].startswith("cgroup") or name not in paths:
            continue
        mounted_at = root / _unescaped(fields[4]).lstrip("/")
        below = _below(paths[name], PurePosixPath(_unescaped(fields[3])))
        yield mounted_at
        yield from (mounted_at.joinpath(*below.parts[:depth]) for depth in range(1, len(below.parts) + 1))


def _own_paths(root: Path, controller: str) -> dict[str | None, PurePosixPath]:
    """Returns this process's path in the hierarchy of `controller` (version 1), by its name, and in that of version 2, by an
    empty text."""
    found: dict[str | None, PurePosixPath] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if not names or controller in names.split(","):
            found[controller if names else ""] = PurePosixPath(path)
    return found


def _below(path: PurePosixPath, mounted: PurePosixPath) -> PurePosixPath:
    """Returns `path` relative to `mounted`, the part of the hierarchy that is mounted; empty if it lies elsewhere, as where
    another namespace wrote it."""
    if ".." in path.parts or not path.is_relative_to(mounted):
        return PurePosixPath()
    return path.relative_to(mounted)


def _unescaped(text: str) -> str:
    """Returns a path of ``mountinfo`` with its octal escapes (a space is ``\\040``) replaced."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _read(path: Path) -> str:
    with suppress(OSError, ValueError):
        return path.read_text()
    return ""
