"""What is computed while tokens are on their way to experts: the shared expert, which every token goes through at home.

    main stream   take ──→ dispatch ──→ experts ──→ combine ──→ join ──→ + sum over tp
    side stream        └─→ gate_up → act → down ───────────────────────↗

On CUDA that is another stream. A CPU rank has one thread, whose collectives wait by running it: there it is computed first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Take = Callable[[], Tensor]
"""Gives the result, once."""
Begin = Callable[[Callable[[], Tensor]], Take]


def begin_on(device: torch.device) -> Begin:
    """How a device begins something that is wanted later."""
    return _OnStream(device) if device.type == "cuda" else _at_once


def _at_once(run: Callable[[], Tensor]) -> Take:
    result = run()
    return lambda: result


class _OnStream:
    """A stream of its own, which sees what was queued before, and is waited for where the result is taken."""

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
