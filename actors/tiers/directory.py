"""The shared tier in a directory: a folder a block, a file a piece, bounded in bytes for all processes together.

    DIR/.ledger                              bytes of all files; locked by whoever adds or removes some
    DIR/ab/abcd…64/l0-4_h0-1_p0-16           a piece (`actors.tiers.file_format`)
    DIR/ab/abcd…64/.new-…                    one being written: renamed when it is whole

A file appears by a rename, so whatever ends a process leaves no half-written piece under a piece's name. Use is noted as the
file's modification time; whoever finds no room left removes the files used longest ago. The ledger counts a file before it
appears, so after a kill it can say too much, never too little; removing files counts them anew.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from actors.tiers.file_format import decode, encode
from actors.tiers.piece import BlockName, Piece

_LEDGER = ".ledger"
_NEW = ".new-"
_STALE_S = 600.0
"""A file still being written after this long has lost its writer."""
_KEEP = 0.9
"""How full the directory is left by making room, so that not every piece has to."""

logger = logging.getLogger(__name__)


class DirectoryTier:
    """At most `limit_bytes` of files in `directory`, which is made where it is not there."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        self.num_damaged = 0
        """Files that were not what they should be, and have been removed."""
        self._pins: Counter[BlockName] = Counter()
        self._lock = Lock()
        directory.mkdir(parents=True, exist_ok=True)
        self._ledger = os.open(directory / _LEDGER, os.O_RDWR | os.O_CREAT, 0o600)
        with self._locked():
            self._write_total(sum(size for _, size, _ in self._files()))

    def pieces(self, block: BlockName) -> list[Piece]:
        try:
            names = os.listdir(self._folder(block))
        except OSError:
            return []
        return [piece for name in names if (piece := Piece.parse(name)) is not None]

    def load(self, block: BlockName, piece: Piece) -> bytes | None:
        path = self._folder(block) / str(piece)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        data = decode(content, block, piece)
        if data is None:
            self.num_damaged += 1
            logger.warning("%s is damaged or not what its name says: removed, and counted as a miss", path)
            self._remove(path)
            return None
        self._used(path)
        return data

    def store(self, block: BlockName, piece: Piece, data: bytes) -> bool:
        path, content = self._folder(block) / str(piece), encode(block, piece, data)
        if path.exists():
            self._used(path)
            return True
        if len(content) > self.limit_bytes:
            return False
        new = path.with_name(f"{_NEW}{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(content)
            with self._locked():
                return self._admit(new, path, len(content))
        except OSError as error:
            logger.warning("a block could not be written to %s: %s", self.directory, error)
            return False
        finally:
            new.unlink(missing_ok=True)

    def pin(self, blocks: Iterable[BlockName]) -> None:
        with self._lock:
            self._pins.update(blocks)

    def unpin(self, blocks: Iterable[BlockName]) -> None:
        with self._lock:
            self._pins.subtract(blocks)
            self._pins = +self._pins

    def close(self) -> None:
        """Close the ledger. Nothing may be called afterwards."""
        os.close(self._ledger)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files as the ledger has them."""
        return int(os.pread(self._ledger, 32, 0) or b"0")

    def _used(self, path: Path) -> None:
        with suppress(OSError):  # removed meanwhile
            os.utime(path)

    def _admit(self, new: Path, path: Path, size: int) -> bool:
        """Let a written file appear under its name, with room made for it. The ledger is locked."""
        if path.exists():  # another process was faster
            return True
        total = self.num_bytes
        if total + size > self.limit_bytes:
            total = self._make_room(size)
        if total + size > self.limit_bytes:
            return False
        self._write_total(total + size)
        os.rename(new, path)
        return True

    def _make_room(self, size: int) -> int:
        """Remove the files used longest ago until `size` more bytes leave it `_KEEP` full; bytes of those that stay."""
        files = sorted(self._files())
        total = sum(each for _, each, _ in files)
        target = min(self.limit_bytes * _KEEP, self.limit_bytes - size)
        for _, each, path in files:
            if total <= target:
                break
            if path.parent.name not in self._pins:
                path.unlink(missing_ok=True)
                total -= each
                with suppress(OSError):  # not empty
                    path.parent.rmdir()
        self._write_total(total)
        return total

    def _remove(self, path: Path) -> None:
        with self._locked(), suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._write_total(max(0, self.num_bytes - size))

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """(when used last, bytes, path) of every piece, and of those whose writers are gone."""
        for path in self.directory.glob("??/*/*"):
            with suppress(OSError):
                found = path.stat()
                if not path.name.startswith(_NEW) or time.time() - found.st_mtime >= _STALE_S:
                    yield found.st_mtime_ns / 1e9, found.st_size, path

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only thread of the only process that changes what is there."""
        with self._lock:  # a file lock is the process's: between its threads it does not hold
            fcntl.flock(self._ledger, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._ledger, fcntl.LOCK_UN)

    def _write_total(self, total: int) -> None:
        os.pwrite(self._ledger, f"{total:<32d}".encode(), 0)

    def _folder(self, block: BlockName) -> Path:
        return self.directory / block[:2] / block
