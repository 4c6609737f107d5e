"""The shared KV tier in a directory: one folder per block, one file per part, with one size limit for all processes together.

    DIR/shardwright-kv-1/.ledger                     total size of all files; locked while files are added or removed
    DIR/shardwright-kv-1/ab/abcd…64/l0-4_h0-1_p0-16  a part (`actors.kv_offload.file_format`)
    DIR/shardwright-kv-1/ab/abcd…64/.new-…           a part being written: renamed once it is complete

Other files in the directory are never touched. A part appears by a rename, so a process that is killed leaves no half-written
file under the name of a part. The modification time of a file records its last use, set earlier for later blocks of a sequence;
a process that needs room removes the least recently used files. The ledger counts a file before it appears, so after a kill its
total can be too high but never too low; making room recounts the files.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from actors.kv_offload import key_layout
from actors.kv_offload.block_part import BlockName, BlockPart
from actors.kv_offload.file_format import decode, encode
from actors.kv_offload.ledger import Ledger

_KEEP = 0.9
"""Fraction of the limit that is kept when room is made, so that not every store has to make room."""
_PLACE_S = 0.1
"""Seconds by which the recorded use of a block precedes that of the block before it, so that eviction drops a sequence's tail
first. It is longer than the compute time of a block, and small compared with the age of evicted files."""
_FULL = (errno.ENOSPC, errno.EDQUOT)

logger = logging.getLogger(__name__)


class DirectoryTier:
    """The `SharedTier` in `directory`, with at most `limit_bytes` of files. The directory is created if it does not exist.

    Raises `DirectoryError` if the directory cannot be used.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        self.num_damaged = 0
        """Number of damaged files found. Each counts as a miss and is removed."""
        self._own = key_layout.own_folder(directory)
        self._pins: Counter[BlockName] = Counter()
        self._pins_lock = Lock()
        self._condemned: set[Path] = set()
        """Damaged files that are not removed yet, because another process had locked the ledger."""
        self._warned: set[int | None] = set()
        try:
            self._ledger = Ledger(self._own / ".ledger")
        except OSError as error:
            raise key_layout.DirectoryError(f"disk_cache {str(directory)!r}: {error.strerror} ({error.filename})") from error
        try:
            with self._ledger.locked():
                self._count_anew()
        except OSError as error:  # another process holds the ledger; the next one to make room recounts
            self._warn_once(error)

    def parts(self, block: BlockName) -> list[BlockPart]:
        """See `SharedTier.parts`."""
        try:
            names = os.listdir(key_layout.folder(self._own, block))
        except OSError:
            return []
        return [part for name in names if (part := BlockPart.parse(name)) is not None]

    def load(self, block: BlockName, part: BlockPart, place: int = 0) -> bytes | None:
        """See `SharedTier.load`. A damaged file is a miss, is counted and logged, and is removed."""
        path = key_layout.folder(self._own, block) / str(part)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        data = decode(content, block, part)
        if data is None:
            self.num_damaged += 1
            logger.warning("%s is damaged or does not match its name: it is removed, and counts as a miss", path)
            self._condemned.add(path)
            with suppress(OSError), self._ledger.locked(wait_s=0):  # a step waits for this: if locked, the next store does it
                self._remove_condemned()
            return None
        self._used(path, place)
        return data

    def store(self, block: BlockName, part: BlockPart, data: bytes, place: int = 0) -> bool:
        """See `SharedTier.store`. Removes the least recently used files to make room. Returns false if the part exceeds the
        limit, if pinned blocks leave no room, or if the directory cannot be written: only the last is logged, once for each
        kind of error."""
        path, content = key_layout.folder(self._own, block) / str(part), encode(block, part, data)
        if path.is_file() and path not in self._condemned:
            self._used(path, place)
            return True
        if len(content) > self.limit_bytes:
            return False
        try:
            return self._written(path, content, place)
        except OSError as error:
            if error.errno not in _FULL:
                return self._warn_once(error)
        try:  # the disk is smaller than the limit, or other files fill it
            with self._ledger.locked():
                self._make_room(len(content), self._count_anew())
            return self._written(path, content, place)
        except OSError as error:
            return self._warn_once(error)

    def pin(self, blocks: Iterable[BlockName]) -> None:
        """See `SharedTier.pin`."""
        with self._pins_lock:
            self._pins.update(blocks)

    def unpin(self, blocks: Iterable[BlockName]) -> None:
        """See `SharedTier.unpin`."""
        with self._pins_lock:
            self._pins.subtract(blocks)
            self._pins = +self._pins

    def close(self) -> None:
        """See `SharedTier.close`. The tier cannot be used afterwards; call this once."""
        self._ledger.close()

    @property
    def num_bytes(self) -> int:
        """Total size of all files in bytes according to the ledger; the files are counted if the ledger has no number."""
        total = self._ledger.total
        return key_layout.num_bytes(self._own) if total is None else total

    def _warn_once(self, error: OSError) -> bool:
        """Log each kind of failure once, since it may affect every block. Always returns false."""
        if error.errno not in self._warned:
            self._warned.add(error.errno)
            logger.warning("%s: %s; no blocks are stored there while this lasts (logged once)", self.directory, error)
        return False

    def _used(self, path: Path, place: int) -> None:
        at = time.time() - place * _PLACE_S
        with suppress(OSError):  # removed meanwhile
            os.utime(path, (at, at))

    def _written(self, path: Path, content: bytes, place: int) -> bool:
        """Write a file and rename it to `path`. Returns whether there was room. Raises `OSError`."""
        new = key_layout.unfinished(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(content)
            with self._ledger.locked():
                self._remove_condemned()
                return self._admit(new, path, len(content), place)
        finally:
            with suppress(OSError):
                new.unlink(missing_ok=True)

    def _admit(self, new: Path, path: Path, size: int, place: int) -> bool:
        """Rename a written file to its final name, making room for it. Returns false if there is no room.

        The ledger must be locked.
        """
        if path.is_file():  # another process was faster
            return True
        total = self._total()
        if total + size > self.limit_bytes:
            total = self._make_room(size, self.limit_bytes)
        if total + size > self.limit_bytes:
            return False
        self._ledger.write(total + size)
        os.rename(new, path)
        self._used(path, place)
        return True

    def _make_room(self, size: int, full: int) -> int:
        """Remove the least recently used files until the rest is at most `_KEEP` of `full` bytes and `size` more fit.

        Blocks that this process has pinned are kept. Returns the total size of the remaining files.
        """
        files = sorted(key_layout.files(self._own))
        total = sum(each for _, each, _ in files)
        target = min(full * _KEEP, full - size)
        for _, each, path in files:
            if total <= target:
                break
            if path.parent.name not in self._pins:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                    total -= each
                    path.parent.rmdir()  # fails where it is not empty
        self._ledger.write(total)
        return total

    def _remove_condemned(self) -> None:
        """Remove the damaged files. The ledger must be locked."""
        while self._condemned:
            path = self._condemned.pop()
            with suppress(OSError):
                size = path.stat().st_size
                path.unlink()
                self._ledger.write(max(0, self._total() - size))

    def _total(self) -> int:
        """Returns the total size of all files, which is recounted if the ledger has no number. The ledger must be locked."""
        total = self._ledger.total
        return self._count_anew() if total is None else total

    def _count_anew(self) -> int:
        total = key_layout.num_bytes(self._own)
        self._ledger.write(total)
        return total
