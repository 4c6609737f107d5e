"""Liveness watch of the joined or embedded Ray cluster, and cleanup of an embedded cluster that can no longer end itself.

Ray's own shutdown waits for processes that are gone, so it cannot be used in that case. Orphans of an embedded cluster (ranks
whose raylet was killed) become children of this process, which is their subreaper, and end with it.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from cluster.embedded.local import Connection

_EVERY_S = 0.5
_SILENCE_S = 10.0
"""Seconds without an answer after which a joined cluster counts as lost."""
_VITAL = ("gcs_server", "raylet")
_PR_SET_CHILD_SUBREAPER = 36


class ClusterWatch:
    """Watches a cluster, and calls `lost` with the reason once it is lost.

    `lost` must not return. It is called at most once, on the watch's own thread or inside `check`.
    """

    def __init__(self, cluster: Connection, lost: Callable[[str], NoReturn]) -> None:
        self._cluster, self._lost = cluster, lost
        self._answered_at = time.monotonic()
        self._over = threading.Event()
        self._only_once = threading.Lock()
        if cluster.embedded:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        else:
            threading.Thread(target=self._ask, name="cluster-pulse", daemon=True).start()
        threading.Thread(target=self._watch, name="cluster-watch", daemon=True).start()

    def check(self) -> None:
        """Return if the cluster is alive or the watch is closed, else call `lost` (given to the constructor), which does not
        return.

        The death of a node other than the head is tolerated, like the loss of a host in a joined cluster.
        """
        for node in self._cluster.others:
            node.dead_processes()  # reaps them: workers would take a zombie for a living raylet
        reason = _dead_process(self._cluster.head) if self._cluster.embedded else self._silence()
        if reason is not None and not self._over.is_set():
            self._only_once.acquire()
            self._lost(reason)

    def close(self) -> None:
        """Stop watching: `lost` is not called any more, so that the cluster can be ended. Does not wait for the watch's
        threads."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.check()

    def _ask(self) -> None:
        import ray

        while not self._over.wait(_EVERY_S):
            with suppress(Exception):  # any exception counts as no answer
                ray.nodes()
                self._answered_at = time.monotonic()

    def _silence(self) -> str | None:
        silent_s = time.monotonic() - self._answered_at
        return (
            None if silent_s < _SILENCE_S else f"the Ray cluster at {self._cluster.address} gave no answer for {silent_s:.0f} s"
        )


def _dead_process(node: Any) -> str | None:
    """Returns how a vital process of the head node (`_VITAL`) has ended, as text, or None if all are running."""
    dead: list[tuple[str, subprocess.Popen[bytes]]] = [] if node is None else node.dead_processes()
    for kind, process in dead:
        if kind in _VITAL:
            code = process.returncode
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            return f"the {kind} of the embedded Ray cluster (process {process.pid}) {how}"
    return None
