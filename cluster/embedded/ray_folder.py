"""The folder in which an embedded Ray cluster keeps its sockets and logs: short, and this user's own.

Ray's default, ``$TMPDIR/ray`` or ``/tmp/ray``, belongs to the first user who starts Ray on a machine, and the path of a Unix
socket has at most 107 bytes::

    /tmp/shardwright-1000 /ray/session_2026-11-30_10-20-30_123456_1234567/sockets/plasma_store.99
    └── at most 36 bytes ┘└─────────────────────────── 71 bytes ──────────────────────────────────┘
"""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from placement.model.errors import ReportedError

VARIABLE = "RAY_TMPDIR"
"""The environment variable with Ray's folder. Unlike an argument, it applies to every file that Ray writes."""
_SOCKET_BYTES = 107
_BELOW = "/ray/session_2026-11-30_10-20-30_123456_1234567/sockets/plasma_store.99"
MOST_BYTES = _SOCKET_BYTES - len(_BELOW)
"""Bytes of the folder's path at most, so that the longest path of a socket below it is legal."""
_BASES = ("/tmp", "/var/tmp", "/dev/shm")


class FolderError(ReportedError, RuntimeError):
    """No folder for Ray's sockets and logs can be used. The message says what is wrong with each, and what to set."""

    code = "no_folder"


def own_folder(bases: Sequence[str] = _BASES) -> str:
    """Returns the folder for Ray's files, which is created if necessary: ``RAY_TMPDIR`` if it is set, else a folder of this
    user in the temporary folder or in the first of `bases` where that is possible.

    Raises `FolderError` if the path in ``RAY_TMPDIR`` is too long or not writable, or no folder is possible.
    """
    asked = os.environ.get(VARIABLE)
    if asked:
        fault = _too_long(asked) or _unusable(Path(asked), is_own=False)
        if fault:
            raise FolderError(f"{VARIABLE}, the folder for Ray's sockets and logs, cannot be used: {fault}. {_REMEDY}")
        return asked
    folders = [Path(base) / f"shardwright-{os.getuid()}" for base in dict.fromkeys((tempfile.gettempdir(), *bases))]
    faults = []
    for folder in folders:
        fault = _too_long(str(folder)) or _unusable(folder, is_own=True)
        if fault is None:
            return str(folder)
        faults.append(fault)
    raise FolderError(f"there is no folder for Ray's sockets and logs: {'; '.join(faults)}. {_REMEDY}")


_REMEDY = f"Set {VARIABLE} to a folder of your own whose path has at most {MOST_BYTES} bytes"


def _too_long(path: str) -> str | None:
    size = len(os.fsencode(os.path.abspath(path)))
    return f"{path} has {size} bytes, and more than {MOST_BYTES} leave no room for a socket" if size > MOST_BYTES else None


def _unusable(folder: Path, is_own: bool) -> str | None:
    """Returns why files cannot be created in `folder`, which is created if it is missing; None if they can. With `is_own`, it
    must belong to this user alone, since others could replace what is in it."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat() if is_own else folder.stat()
        if is_own and (found.st_uid != os.getuid() or found.st_mode & 0o77 or not folder.is_dir()):
            return f"{folder} belongs to {_name(found.st_uid)} and has mode {found.st_mode & 0o7777:o}, not to this user alone"
        inside = folder / "ray"  # Ray's own subfolder, which another user may have created
        inside.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=inside):
            return None
    except OSError as error:
        path = Path(error.filename) if isinstance(error.filename, str) and Path(error.filename).is_absolute() else folder
        return f"{path}: {error.strerror}{_owned(folder)}"


def _owned(folder: Path) -> str:
    """Returns who owns the folder, or the part of its path that exists, as an addition to an error."""
    for each in (folder / "ray", folder, *folder.parents):
        with suppress(OSError):
            return f" ({each} belongs to {_name(each.stat().st_uid)})"
    return ""


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
