"""Waiting for a placement: periodic retries, with progress messages in the log and to the command that started the replica.

The messages are published in Ray's internal key-value store, which is available before any replica runs.
"""

from __future__ import annotations

import logging
import secrets
import time

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from cluster.embedded.local import NAMESPACE
from placement.model.errors import ReportedError

log = logging.getLogger("shardwright.placement")

_REPORT_EVERY_S = 5.0
_LOOK_EVERY_S = 0.5
_KEY = b"waiting-"
_WHERE = NAMESPACE.encode()


class PlacementError(ReportedError, RuntimeError):
    """Raised when the cluster cannot place a replica, or did not in time. The message names the bundle, the resource, and what
    the nodes have."""

    code = "no_room"


class PlacementWait:
    """Paces the retries of a reservation until `timeout_s` seconds have passed."""

    def __init__(self, timeout_s: float) -> None:
        self._began, self._timeout_s = time.monotonic(), timeout_s
        self._reported_at = self._began
        self._key = _KEY + secrets.token_hex(8).encode()

    def poll(self, why: str) -> None:
        """Sleep until the next retry (0.5 s); every 5 s, also log the reason `why` for waiting and publish it for
        `wait_messages`.

        Raises `PlacementError` with `why` if the timeout of the wait has passed.
        """
        now = time.monotonic()
        if now - self._began > self._timeout_s:
            raise PlacementError(f"{why} (waited {now - self._began:.0f} s)")
        if now - self._reported_at > _REPORT_EVERY_S:
            line = f"waiting for a placement, {now - self._began:.0f} of {self._timeout_s:.0f} s: {why}"
            log.warning("%s", line)
            _internal_kv_put(self._key, line.encode(), namespace=_WHERE)
            self._reported_at = now
        time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        """Withdraw the message that `poll` has published, if there is one."""
        if self._reported_at > self._began:
            _internal_kv_del(self._key, namespace=_WHERE)


def wait_messages() -> list[str]:
    """Returns the last message that each waiting replica of the connected cluster has published (see `PlacementWait`),
    including replicas killed while waiting."""
    lines = (_internal_kv_get(key, namespace=_WHERE) for key in _internal_kv_list(_KEY, namespace=_WHERE))
    return [line.decode() for line in lines if line]
