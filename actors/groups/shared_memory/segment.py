"""The shared-memory segment of one group: a file in /dev/shm, whose name is removed once all ranks have mapped it.

::

    header | a block per rank: flags, process | a block per ordered pair: mailbox counters and records
    slots: 2 per rank (even and odd steps)    | rings: 1 per ordered pair

The file's name contains the process that created it. The file is removed when every rank has attached, or by a process that
finds its creator dead. A crash of all ranks may leave files behind; the next group created on the host removes them.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from actors.groups.group import GroupError
from actors.groups.liveness import ProcessId, pid_space

DIRECTORY = Path("/dev/shm")
PREFIX = "shardwright"
_UNFINISHED = "-new"
LINE_BYTES = 64
"""A cache line: flags of different writers never share one."""
RECORDS = 64
"""Number of messages that may be in flight in one mailbox."""
RECORD_BYTES = 64
_PAGE_BYTES = 4096
_SLOT_HEADER_BYTES = 512
_PAIR_COUNTER_BYTES = 2 * LINE_BYTES
_RANK_BYTES = 4 * LINE_BYTES
MAX_RANKS = _SLOT_HEADER_BYTES // 8 - 1


@dataclass(frozen=True)
class Geometry:
    """The layout of the file, as byte offsets. Every rank computes the same offsets from the same three numbers."""

    size: int
    slot_bytes: int
    ring_bytes: int

    def rank_block(self, rank: int) -> int:
        """Return the byte offset of a rank's flags and process: one cache line for the counter that peers poll, the next for
        the rest."""
        return _PAGE_BYTES + rank * _RANK_BYTES

    def pair_block(self, source: int, to: int) -> int:
        """Return the byte offset of the counters of the mailbox from rank `source` to rank `to` (sent and taken, a cache line
        each), which its records follow."""
        return self.rank_block(self.size) + (source * self.size + to) * (_PAIR_COUNTER_BYTES + RECORDS * RECORD_BYTES)

    def slot_header(self, rank: int, parity: int) -> int:
        """Return the byte offset of the description of a rank's slot of the even (`parity` 0) or odd (1) steps."""
        return self.pair_block(self.size, 0) + (2 * rank + parity) * _SLOT_HEADER_BYTES

    def slot(self, rank: int, parity: int) -> int:
        """Return the byte offset of a rank's slot of `slot_bytes` data bytes for the even (`parity` 0) or odd (1) steps."""
        first = _round_up(self.slot_header(self.size, 0), _PAGE_BYTES)
        return first + (2 * rank + parity) * self.slot_bytes

    def ring(self, source: int, to: int) -> int:
        """Return the byte offset of the ring of `ring_bytes` data bytes of the mailbox from rank `source` to rank `to`, another
        one."""
        before = source * (self.size - 1) + (to if to < source else to - 1)
        return self.slot(self.size, 0) + before * self.ring_bytes

    @property
    def total_bytes(self) -> int:
        """Size of the group's shared-memory file, in bytes."""
        return self.slot(self.size, 0) + self.size * (self.size - 1) * self.ring_bytes


def create(name: str, geometry: Geometry) -> tuple[Path, mmap.mmap]:
    """Create the file of the group `name`, filled with zeros, with its memory reserved, after removing files of dead creators.
    It appears under its name complete or not at all. Returns its path and its mapped memory.

    Raises `GroupError` if there is not enough memory (touching it later would end the process with SIGBUS), if this process is
    already creating a group of that name, or if the name is not 1 to 120 letters, digits, dots and underscores.
    """
    sweep()
    path = DIRECTORY / f"{PREFIX}-{_checked(name)}-{ProcessId.current()}"
    unfinished = path.with_name(path.name + _UNFINISHED)
    try:
        file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(file, 0, geometry.total_bytes)
            memory = mmap.mmap(file, geometry.total_bytes)
            os.link(unfinished, path)
        finally:
            os.close(file)
            unfinished.unlink()
    except FileExistsError as error:
        raise GroupError(f"shared-memory group {name!r} is already being made by this process: {path} exists") from error
    except OSError as error:
        raise GroupError(
            f"shared-memory group {name!r} of {geometry.size} ranks needs {geometry.total_bytes / 2**20:.1f} MiB "
            f"in {DIRECTORY}: {error}. Give the container more (docker run --shm-size), or use gloo"
        ) from error
    return path, memory


def find(name: str) -> Path | None:
    """Return the file of the group `name` whose creator is still running on this host, or None. Raises `GroupError` if the name
    is not 1 to 120 letters, digits, dots and underscores."""
    for path, process in _files(_checked(name)):
        if not path.name.endswith(_UNFINISHED) and process.space == pid_space() and not process.has_ended():
            return path
    return None


def map_existing(path: Path, geometry: Geometry) -> mmap.mmap:
    """Map the file `path` found by `find`, and return its memory. Raises `GroupError` if another user owns it, or if its size
    is not that of `geometry`, and `FileNotFoundError` if it has been removed meanwhile."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except PermissionError:
        raise GroupError(f"{path} belongs to another user than this rank's (user {os.getuid()})") from None
    try:
        status = os.fstat(file)
        if status.st_uid != os.getuid() or status.st_size != geometry.total_bytes:
            raise GroupError(
                f"{path} (user {status.st_uid}, {status.st_size} bytes) is not the group this rank (user {os.getuid()}) was "
                f"expected to join: {geometry} takes {geometry.total_bytes} bytes"
            )
        return mmap.mmap(file, geometry.total_bytes)
    finally:
        os.close(file)


def maker(path: Path) -> ProcessId:
    """Return the process that created the group file `path`, from its name. Raises `ValueError` if the name does not end with a
    process."""
    return ProcessId.parse(path.name.removesuffix(_UNFINISHED).split("-", 2)[2])


def sweep() -> None:
    """Remove the group files in /dev/shm whose creators have ended. Files that cannot be removed are left."""
    for path, process in _files("*"):
        if process.has_ended():
            with suppress(OSError):
                path.unlink()


def _files(name: str) -> Iterator[tuple[Path, ProcessId]]:
    for path in DIRECTORY.glob(f"{PREFIX}-{name}-*"):
        with suppress(ValueError):
            yield path, maker(path)


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._]{1,120}", name):
        raise GroupError(f"group name {name!r}: use 1 to 120 letters, digits, dots and underscores")
    return name


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
