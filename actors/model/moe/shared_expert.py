"""Overlapping the shared expert, which every token goes through on its own rank, with token dispatch and combine.

    main stream   take ──→ dispatch ──→ experts ──→ combine ──→ join ──→ + sum over tp
    side stream        └─→ gate_up → act → down ───────────────────────↗

On CUDA it runs on a second stream. A CPU rank has one thread, which also runs its collectives, so there it is computed first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Take = Callable[[], Tensor]
"""A function that returns the result; call it once."""
Begin = Callable[[Callable[[], Tensor]], Take]


def begin_on(device: torch.device) -> Begin:
    """Return the function `begin` of a device: ``take = begin(compute)`` starts `compute`, and ``take()``, called once, returns
    its result.

    On CUDA `compute` is queued on a second stream, and ``take()`` makes the current stream wait for it. On any other device
    `begin` computes the result at once.
    """
    return _OnStream(device) if device.type == "cuda" else _at_once


def _at_once(run: Callable[[], Tensor]) -> Take:
    result = run()
    return lambda: result


class _OnStream:
    """A second CUDA stream. It waits for the work queued before, and taking the result waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], Tensor]) -> Take:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = run()

        def take() -> Tensor:
            here = torch.cuda.current_stream()
            here.wait_stream(self._stream)
            result.record_stream(here)
            return result

        return take
