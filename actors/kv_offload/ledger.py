"""The ledger of a directory that several processes share: a lock file that stores the total size of the directory's files."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

LOCK_WAIT_S = 2.0
"""Seconds after which waiting for the lock fails, so that a process suspended while holding it does not block the others."""
_POLL_S = 0.01
_DIGITS = 32


class Ledger:
    """A file that stores the total size, and the lock under which it is changed. Raises `OSError` if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._lock = Lock()

    @property
    def total(self) -> int | None:
        """The stored total size of all files in bytes, or None if the file contains no number."""
        text = os.pread(self._file, _DIGITS, 0).strip()
        return int(text) if text.isdigit() else None

    def write(self, total: int) -> None:
        """Store `total` as the total size in bytes; the caller holds the lock. Raises `OSError` if it cannot be written."""
        os.pwrite(self._file, f"{total:<{_DIGITS}d}".encode(), 0)

    @contextmanager
    def locked(self, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
        """Hold the lock while the ``with`` block runs, which excludes all other threads and processes. Raises `TimeoutError` if
        it is not free within `wait_s` seconds, and `OSError` if the file cannot be locked."""
        deadline = time.monotonic() + wait_s
        if not self._lock.acquire(timeout=wait_s):  # a file lock does not exclude threads of one process
            raise TimeoutError(self._busy(wait_s))
        try:
            self._turn(deadline, wait_s)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the file. The ledger cannot be used afterwards; a second call raises `OSError`."""
        os.close(self._file)

    def _turn(self, deadline: float, wait_s: float) -> None:
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(self._busy(wait_s)) from None
            time.sleep(_POLL_S)

    def _busy(self, wait_s: float) -> str:
        return f"{self.path} was locked by another process or thread for {wait_s:g} s"
