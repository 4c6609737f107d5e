"""Where the files of a directory tier lie, and which files are its own: no other file is ever counted or removed."""

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
"""The folder in a person's directory that is ours."""
_STALE_S = 600.0
"""A file still being written after this long has lost its writer."""
_SHORT = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{64}")
_NEW = re.compile(r"\.new-[0-9a-f]{32}")


class DirectoryError(ValueError):
    """A directory that cannot hold blocks: says which, and why."""


def own_folder(directory: Path) -> Path:
    """Our folder in `directory`; both are made where they are not there. Raises `DirectoryError`."""
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
    """Where the parts of a block lie."""
    return own / block[:2] / block


def unfinished(path: Path) -> Path:
    """A name beside `path` for what is being written."""
    return path.with_name(f".new-{uuid.uuid4().hex}")


def files(own: Path) -> Iterator[tuple[int, int, Path]]:
    """(when used last in ns, bytes, path) of every part, and of those whose writers are gone."""
    for short in _folders(own, _SHORT):
        for block in _folders(short, _BLOCK):
            for entry in _entries(block):
                with suppress(OSError):  # removed meanwhile
                    found = entry.stat(follow_symlinks=False)
                    if entry.is_file(follow_symlinks=False) and _is_part_or_stale(entry.name, found.st_mtime):
                        yield found.st_mtime_ns, found.st_size, Path(entry.path)


def num_bytes(own: Path) -> int:
    """Bytes of all of those."""
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
