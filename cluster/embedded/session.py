"""Session files of embedded clusters, through which other commands of the same user find and join a running one.

There is one small file per embedded cluster. It is readable by its owner only, because it contains the cluster's token.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Session:
    """An embedded cluster: its address, and the environment variables of Ray that are needed to join it."""

    address: str
    environment: dict[str, str]


def remember(session: Session) -> None:
    """Write the session file of the cluster that this process embeds, so that `latest` finds it in other processes of this
    user.

    The files of processes that have ended are deleted. Errors of the file system are ignored; so is a folder that other users
    could read.
    """
    with suppress(OSError):
        folder = _folder()
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(folder):
            return
        for path in folder.glob("[0-9]*.json"):
            if not Path(f"/proc/{path.stem}").exists():
                path.unlink(missing_ok=True)
        new = folder / f".{os.getpid()}"
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(session), file)
        new.rename(folder / f"{os.getpid()}.json")


def forget() -> None:
    """Delete the session file of the cluster that this process embeds, if there is one. Errors of the file system are
    ignored."""
    with suppress(OSError):
        (_folder() / f"{os.getpid()}.json").unlink(missing_ok=True)


def latest() -> Session | None:
    """Returns the session of the newest embedded cluster whose process is still running and belongs to this user, or None if
    there is none or the session files cannot be read."""
    with suppress(OSError):
        if _is_ours(_folder()):
            living = [path for path in _folder().glob("[0-9]*.json") if Path(f"/proc/{path.stem}").exists()]
            for path in sorted(living, key=lambda path: path.stat().st_mtime, reverse=True):
                with suppress(ValueError, TypeError):
                    return Session(**json.loads(path.read_text()))
    return None


def _folder() -> Path:
    """Returns the folder of the session files, below ``XDG_RUNTIME_DIR`` unless this user may not use that folder (``su``
    leaves the variable as it was)."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    base = given if given and os.access(given, os.W_OK | os.X_OK) else tempfile.gettempdir()
    return Path(base) / f"shardwright-{os.getuid()}"


def _is_ours(folder: Path) -> bool:
    found = folder.lstat()
    return found.st_uid == os.getuid() and found.st_mode & 0o77 == 0
