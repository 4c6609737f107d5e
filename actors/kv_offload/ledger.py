"""What all processes that share a directory know together: how many bytes it holds, and whose turn it is to change that."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

LOCK_WAIT_S = 2.0
"""A store that waits longer for its turn is given up: a process that was stopped with the lock must not stop others."""
_POLL_S = 0.01
_DIGITS = 32


class Ledger:
    """A file with a number, locked by whoever changes it. Raises `OSError` where it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._lock = Lock()

    @property
    def total(self) -> int | None:
        """Bytes of all files; None where what is written there is no number."""
        text = os.pread(self._file, _DIGITS, 0).strip()
        return int(text) if text.isdigit() else None

    def write(self, total: int) -> None:
        """Say that there are `total` bytes. Raises `OSError`."""
        os.pwrite(self._file, f"{total:<{_DIGITS}d}".encode(), 0)

    @contextmanager
    def locked(self, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
        """Be the only thread of the only process that changes what is there. Raises `TimeoutError` after `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        if not self._lock.acquire(timeout=wait_s):  # a file lock is the process's: between its threads it does not hold
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
        """Close the file. Nothing may be called afterwards."""
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
        return f"{self.path} was locked by another process, or thread, for {wait_s:g} s"
