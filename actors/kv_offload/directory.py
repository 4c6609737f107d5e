"""The shared tier in a directory: a folder a block, a file a part, bounded in bytes for all processes together.

    DIR/shardwright-kv-1/.ledger                     bytes of all files; locked by whoever adds or removes some
    DIR/shardwright-kv-1/ab/abcd…64/l0-4_h0-1_p0-16  a part (`actors.kv_offload.file_format`)
    DIR/shardwright-kv-1/ab/abcd…64/.new-…           one being written: renamed when it is whole

Whatever else lies there is a person's, and left alone. A file appears by a rename, so whatever ends a process leaves no
half-written part under a part's name. Use is noted as the file's modification time, earlier for the later blocks of a
sequence; whoever finds no room left removes the files used longest ago. The ledger counts a file before it appears, so after a
kill it can say too much, never too little; removing files counts them anew.
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
"""How full the directory is left by making room, so that not every part has to."""
_PLACE_S = 0.1
"""How much longer ago a block counts as used than the one before it, so that of a sequence its end goes first: more than what
computing a block takes, and little beside the age of what is given up."""
_FULL = (errno.ENOSPC, errno.EDQUOT)

logger = logging.getLogger(__name__)


class DirectoryTier:
    """At most `limit_bytes` of files in `directory`, which is made where it is not there. Raises `DirectoryError`."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        self.num_damaged = 0
        """Files that were not what they should be: misses, and removed."""
        self._own = key_layout.own_folder(directory)
        self._pins: Counter[BlockName] = Counter()
        self._pins_lock = Lock()
        self._condemned: set[Path] = set()
        """Damaged files that are still there, because another process had the ledger."""
        self._warned: set[int | None] = set()
        try:
            self._ledger = Ledger(self._own / ".ledger")
        except OSError as error:
            raise key_layout.DirectoryError(f"disk_cache {str(directory)!r}: {error.strerror} ({error.filename})") from error
        try:
            with self._ledger.locked():
                self._count_anew()
        except OSError as error:  # another process is at it; whoever makes room counts
            self._warn_once(error)

    def parts(self, block: BlockName) -> list[BlockPart]:
        try:
            names = os.listdir(key_layout.folder(self._own, block))
        except OSError:
            return []
        return [part for name in names if (part := BlockPart.parse(name)) is not None]

    def load(self, block: BlockName, part: BlockPart, place: int = 0) -> bytes | None:
        path = key_layout.folder(self._own, block) / str(part)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        data = decode(content, block, part)
        if data is None:
            self.num_damaged += 1
            logger.warning("%s is damaged or not what its name says: removed, and counted as a miss", path)
            self._condemned.add(path)
            with suppress(OSError), self._ledger.locked(wait_s=0):  # else the next store does it: a step waits for this
                self._remove_condemned()
            return None
        self._used(path, place)
        return data

    def store(self, block: BlockName, part: BlockPart, data: bytes, place: int = 0) -> bool:
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
        try:  # the disk is smaller than the limit, or others fill it
            with self._ledger.locked():
                self._make_room(len(content), self._count_anew())
            return self._written(path, content, place)
        except OSError as error:
            return self._warn_once(error)

    def pin(self, blocks: Iterable[BlockName]) -> None:
        with self._pins_lock:
            self._pins.update(blocks)

    def unpin(self, blocks: Iterable[BlockName]) -> None:
        with self._pins_lock:
            self._pins.subtract(blocks)
            self._pins = +self._pins

    def close(self) -> None:
        """Close the ledger. Nothing may be called afterwards."""
        self._ledger.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files as the ledger has them; counted, where it has no number."""
        total = self._ledger.total
        return key_layout.num_bytes(self._own) if total is None else total

    def _warn_once(self, error: OSError) -> bool:
        """Log a kind of failure once, as every block may meet it. Always False."""
        if error.errno not in self._warned:
            self._warned.add(error.errno)
            logger.warning("%s: %s; blocks are not kept there while that lasts, and this is said once", self.directory, error)
        return False

    def _used(self, path: Path, place: int) -> None:
        at = time.time() - place * _PLACE_S
        with suppress(OSError):  # removed meanwhile
            os.utime(path, (at, at))

    def _written(self, path: Path, content: bytes, place: int) -> bool:
        """Write a file and let it appear. Raises `OSError`."""
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
        """Let a written file appear under its name, with room made for it. The ledger is locked."""
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
        """Remove the files used longest ago until what stays is `_KEEP` of `full` bytes and `size` more fit into those; bytes
        of the files that stay."""
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
        """The ledger is locked."""
        while self._condemned:
            path = self._condemned.pop()
            with suppress(OSError):
                size = path.stat().st_size
                path.unlink()
                self._ledger.write(max(0, self._total() - size))

    def _total(self) -> int:
        """Bytes of all files; the ledger is locked, and put right where it has no number."""
        total = self._ledger.total
        return self._count_anew() if total is None else total

    def _count_anew(self) -> int:
        total = key_layout.num_bytes(self._own)
        self._ledger.write(total)
        return total
