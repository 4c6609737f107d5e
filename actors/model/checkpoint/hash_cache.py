"""A cache of hashes of parts of weight files, in the user's cache folder, so that a restart does not read the weights twice.

    ~/.cache/shardwright/weights/IDENTITY      one file for each weight file; a line is BEGIN END HASH of a run of bytes

The identity of a weight file consists of its device, inode, size, and the times of the last change of its content and of its
inode. A user cannot set the last one, so a rewritten file gets a new identity even if its old times are restored.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("shardwright.checkpoint")

_FORM = "1"
_LINE = re.compile(r"(\d+) (\d+) ([0-9a-f]{64})")
_SETTLED_S = 60.0
"""Age in seconds of the last change of a file from which the next change is certain to have another time. File systems store
times in steps, and a program that changes a file through a memory map may change a page again, for about half a minute, without
a new time."""
_MOST_FILES = 2000

FileRun = tuple[int, int]
"""Begin and end of a run of bytes in a file."""


@dataclass(frozen=True)
class FileIdentity:
    """The identity of the content of a file, without reading it. Times are in nanoseconds since the epoch."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileIdentity:
        """Returns the identity of the file with the given status."""
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class HashCache:
    """The cached hashes in a folder. A folder that cannot be used is a cache that has nothing and keeps nothing.

    `settled_s` is the age in seconds of the last change of a file from which its hashes are kept; tests shorten it.
    """

    def __init__(self, folder: Path, settled_s: float = _SETTLED_S) -> None:
        self._folder, self._settled_s = folder, settled_s

    @classmethod
    def of_user(cls, environment: Mapping[str, str]) -> HashCache:
        """Returns the cache of this user: ``shardwright/weights`` in ``XDG_CACHE_HOME``, which `environment` may have, or else
        in ``~/.cache``."""
        try:
            folder = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError:  # a user without a home
            folder = Path(os.devnull)
        return cls(folder / "shardwright" / "weights")

    def keeps(self, identity: FileIdentity) -> bool:
        """Whether hashes of bytes that are read from now on may be added: whether any further change of the file is certain to
        change its identity."""
        return time.time() - max(identity.modified_ns, identity.changed_ns) / 1e9 > self._settled_s

    def known(self, identity: FileIdentity) -> dict[FileRun, bytes]:
        """Returns the SHA-256 of each run of bytes of a weight file that is in the cache. Damaged lines are skipped."""
        with suppress(OSError):
            lines = self._path(identity).read_text(encoding="ascii", errors="replace").splitlines()
            found = filter(None, map(_LINE.fullmatch, lines))
            return {(int(line[1]), int(line[2])): bytes.fromhex(line[3]) for line in found}
        return {}

    def add(self, identity: FileIdentity, hashes: Mapping[FileRun, bytes]) -> None:
        """Add the SHA-256 of runs of bytes of a weight file, for which `keeps` was true before they were read.

        Several processes may add to the same file. A failure is logged.
        """
        if not hashes:
            return
        text = "".join(f"{begin} {end} {digest.hex()}\n" for (begin, end), digest in hashes.items())
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(self._path(identity), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, text.encode())  # one call, so that lines of several ranks do not mix
            finally:
                os.close(handle)
            self._prune()
        except OSError as error:
            log.warning("hashes of weights are not kept, so every start computes them: %s", error)

    def _path(self, identity: FileIdentity) -> Path:
        return self._folder / hashlib.sha256(f"{_FORM} {identity}".encode()).hexdigest()[:32]

    def _prune(self) -> None:
        """Remove the oldest files if there are too many."""
        files = list(self._folder.iterdir())
        if len(files) > _MOST_FILES:
            for _, path in sorted((path.stat().st_mtime, path) for path in files)[: len(files) - _MOST_FILES]:
                path.unlink(missing_ok=True)
