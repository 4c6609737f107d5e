"""When what a step has computed may be read: at once where maths is done when it returns, later where a device queues it.

    host      queue range 0 │ queue range 1 │ wait for 0, send it │ queue range 2 │ wait for 1, send it │ ...
    device          range 0 ─────────────→│ range 1 ─────────────────→│ range 2 ...

The device always has a range to do while the host waits for the one before, and what is gathered for sending is gathered on a
stream of its own, behind no later range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Act = Callable[[], None]


class QueueOrder(Protocol):
    """Calls what reads values in the order they were computed. Used by one thread."""

    def put(self, act: Act) -> None:
        """Call `act` once all that is queued by now has run; possibly not before the next call of either method."""

    def flush(self) -> None:
        """Call what has not been called."""


class AtOnce:
    """That of maths which is done when it returns."""

    def put(self, act: Act) -> None:
        act()

    def flush(self) -> None:
        """Nothing waits."""


class OneBehind:
    """That of a CUDA device: an act is called when the next one is put, on a stream that waits for its own moment only. What it
    reads it must wait for on the current stream. `cuda`: `torch.cuda`, or what behaves so."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda, self._stream = device, cuda, cuda.Stream(device)
        self._waiting: tuple[Any, Act] | None = None

    def put(self, act: Act) -> None:
        moment = self._cuda.Event()
        moment.record(self._cuda.current_stream(self._device))
        self.flush()
        self._waiting = moment, act

    def flush(self) -> None:
        if self._waiting is None:
            return
        (moment, act), self._waiting = self._waiting, None
        self._stream.wait_event(moment)
        with self._cuda.stream(self._stream):
            act()


def queue_order(device: torch.device) -> QueueOrder:
    """That of a device."""
    return OneBehind(device) if device.type == "cuda" else AtOnce()
