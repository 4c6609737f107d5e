"""Ordering of KV sends after the compute that produces the KV: at once on a CPU, one range of layers later on a CUDA device.

    host      queue range 0 │ queue range 1 │ wait for 0, send it │ queue range 2 │ wait for 1, send it │ ...
    device          range 0 ─────────────→│ range 1 ─────────────────→│ range 2 ...

A CPU kernel is finished when it returns; a CUDA device runs its queue asynchronously. The device always has a range of layers
to compute while the host waits for the previous one. The values to send are gathered on a separate stream, so that the gather
does not wait for a later range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Act = Callable[[], None]


class QueueOrder(Protocol):
    """Calls functions that read computed values, in the order in which the values are computed. Used by one thread."""

    def put(self, act: Act) -> None:
        """Call `act` once all work queued on the device so far has run. The call may be deferred to the next call of `put` or
        `flush`. An exception of `act` is raised by the method that calls it."""

    def flush(self) -> None:
        """Call every deferred function now, in order."""


class AtOnce:
    """The `QueueOrder` of a device whose operations are finished when they return: functions are called at once."""

    def put(self, act: Act) -> None:
        """See `QueueOrder.put`. Calls `act` at once."""
        act()

    def flush(self) -> None:
        """See `QueueOrder.flush`. Does nothing: no function is deferred."""


class OneBehind:
    """The `QueueOrder` of a CUDA device: a function is called when the next one is put.

    It runs on a separate stream, which waits for the event recorded at its own `put` only. If it needs its results on the host,
    it must synchronize the current stream. `cuda` is `torch.cuda` or an object with the same interface.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda, self._stream = device, cuda, cuda.Stream(device)
        self._waiting: tuple[Any, Act] | None = None

    def put(self, act: Act) -> None:
        """See `QueueOrder.put`. Calls the function of the previous `put`, and defers `act`."""
        moment = self._cuda.Event()
        moment.record(self._cuda.current_stream(self._device))
        self.flush()
        self._waiting = moment, act

    def flush(self) -> None:
        """See `QueueOrder.flush`."""
        if self._waiting is None:
            return
        (moment, act), self._waiting = self._waiting, None
        self._stream.wait_event(moment)
        with self._cuda.stream(self._stream):
            act()


def queue_order(device: torch.device) -> QueueOrder:
    """Returns a new `QueueOrder` for computations on `device`: `OneBehind` for CUDA, else `AtOnce`."""
    return OneBehind(device) if device.type == "cuda" else AtOnce()
