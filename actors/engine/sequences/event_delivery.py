"""Delivery of token events to the callbacks of their requests: in order, with exactly one final event for each request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from actors.wire.requests import TokenEvent

Deliver = Callable[[TokenEvent], None]
"""Callback for the events of a request. It is called from the engine's thread, one call at a time, and must return quickly. An
exception ends only that request."""

logger = logging.getLogger(__name__)


class EventDelivery:
    """The callbacks of live requests. Events of a request that has ended are dropped."""

    def __init__(self, flush: Callable[[], None]) -> None:
        """Create an empty registry. `flush` is called after the events of a step, so that receivers can send them together."""
        self._flush = flush
        self._lock = threading.RLock()
        """Held during callbacks, so that no event of a request can follow its last one."""
        self._callbacks: dict[str, Deliver] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._callbacks

    def open(self, request_id: str, deliver: Deliver) -> None:
        """Register `deliver` as the callback for the events of a new request.

        Does not take this object's lock: the caller holds its own lock here, and a callback, which runs under this object's
        lock, may take the caller's.
        """
        self._callbacks[request_id] = deliver

    def deliver(self, events: Iterable[TokenEvent]) -> list[str]:
        """Pass each of `events` to the callback of its request, then call `flush`. Events of requests that have ended are
        dropped.

        Returns the ids of requests whose callbacks raised. They are removed here, and the caller must cancel them.
        """
        with self._lock:
            raised = [event.request_id for event in events if not self._deliver(event)]
        self._flush()
        return raised

    def _deliver(self, event: TokenEvent) -> bool:
        callback = self._callbacks.get(event.request_id)
        if callback is None:
            return True
        if event.finish is not None:
            del self._callbacks[event.request_id]
        return self._call(callback, event)

    def fail_all(self, reason: str) -> None:
        """End every live request with a ``lost`` event whose text is `reason`, then call `flush`."""
        with self._lock:
            while self._callbacks:
                request_id, callback = self._callbacks.popitem()
                self._call(callback, TokenEvent(request_id=request_id, finish="lost", error=reason))
        self._flush()

    def _call(self, callback: Deliver, event: TokenEvent) -> bool:
        try:
            callback(event)
        except Exception:
            logger.exception("the receiver of request %s raised; the request is dropped", event.request_id)
            self._callbacks.pop(event.request_id, None)
            return False
        return True
