"""Paths of the files of a directory tier, and the recognition of its own files: no other file is ever counted or removed."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from actors.kv_offload.block_part import BlockName, BlockPart

OWN_FOLDER = "shardwright-kv-1"
"""Name of the folder that the tier owns inside the user's directory."""
_STALE_S = 600.0
"""Age in seconds from which an unfinished file is treated as abandoned by its writer."""
_SHORT = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{64}")
_NEW = re.compile(r"\.new-[0-9a-f]{32}")


class DirectoryError(ValueError):
    """Raised when a directory cannot store blocks. The message names the directory and the reason."""


def own_folder(directory: Path) -> Path:
    """Returns the tier's folder in `directory`; both are created if they do not exist. Raises `DirectoryError` if the folder
    cannot be created, read or written."""
    own = directory / OWN_FOLDER
    try:
        own.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DirectoryError(f"disk_cache {str(directory)!r}: {error.strerror} ({error.filename}); {_WORKS}") from error
    if not os.access(own, os.R_OK | os.W_OK | os.X_OK):
        raise DirectoryError(f"disk_cache {str(directory)!r}: {own} cannot be read and written by this user; {_WORKS}")
    return own


_WORKS = "give a directory that can be made and written on every machine with ranks"


def folder(own: Path, block: BlockName) -> Path:
    """Returns the folder of the parts of a block, in the tier's folder `own`. It need not exist."""
    return own / block[:2] / block


def unfinished(path: Path) -> Path:
    """Returns a new temporary path next to `path`, for the content of that file while it is being written."""
    return path.with_name(f".new-{uuid.uuid4().hex}")


def files(own: Path) -> Iterator[tuple[int, int, Path]]:
    """Yields (time of last use, size in bytes, path) of every file in the tier's folder `own` that counts towards its size.

    These are the block parts, and unfinished files whose writer has not touched them for 600 s. The time is in nanoseconds
    since the epoch. The order is arbitrary. Folders and files that cannot be read are skipped.
    """
    for short in _folders(own, _SHORT):
        for block in _folders(short, _BLOCK):
            for entry in _entries(block):
                with suppress(OSError):  # removed in the meantime
                    found = entry.stat(follow_symlinks=False)
                    if entry.is_file(follow_symlinks=False) and _is_part_or_stale(entry.name, found.st_mtime):
                        yield found.st_mtime_ns, found.st_size, Path(entry.path)


def num_bytes(own: Path) -> int:
    """Returns the total size in bytes of all `files` in the tier's folder `own`."""
    return sum(size for _, size, _ in files(own))


def _is_part_or_stale(name: str, used_at: float) -> bool:
    part = BlockPart.parse(name)
    if part is not None:
        return str(part) == name
    return _NEW.fullmatch(name) is not None and time.time() - used_at >= _STALE_S


def _folders(path: Path, names: re.Pattern[str]) -> list[Path]:
    found = [entry for entry in _entries(path) if names.fullmatch(entry.name)]
    return [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:
        return []
