"""Expert load counters of one layer on one rank (EPLB): tokens of each expert, and seconds.

    fast rank   [   experts    ][ combine: waits for the slow one | results ]
    slow rank   [   experts                                       ][ results ]

A token is counted where an expert ran it; steps have no padding tokens. On CUDA seconds are measured between events on the
stream and read only in `take`, so that no step waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerLoad:
    """The load of one layer on this rank: tokens run by each expert of the layer, seconds of the experts and of the combine."""

    tokens: list[int]
    expert_s: float
    combine_s: float


class LoadCounters:
    """Load counters of one layer, for EPLB."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self._tokens = torch.zeros(num_experts, dtype=torch.int64, device=device)
        clock = CudaTime if device.type == "cuda" else HostTime
        self.experts, self.combine = clock(), clock()

    def ran(self, held: Tensor, tokens: Tensor) -> None:
        """Add the numbers `tokens` [own slots] int64 that each own slot has run to the load of the experts `held` [own slots]
        in them."""
        self._tokens.index_add_(0, held, tokens)

    def take(self) -> LayerLoad:
        """Return the load since the last call, and reset the counters. On CUDA it waits for the device."""
        load = LayerLoad(self._tokens.tolist(), self.experts.take(), self.combine.take())
        self._tokens.zero_()
        return load


class HostTime:
    """Seconds spent inside spans, by the host's clock."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def span(self) -> Iterator[None]:
        """Return a context manager that adds the host time spent inside it; a span that raises is not counted."""
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """Return the seconds spent inside spans since the last call, and start again from 0."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class CudaTime:
    """Seconds spent inside spans, by the device's clock."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """Return a context manager that adds the device time of the work queued inside it; a span that raises is not
        counted."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        yield
        ended.record()
        self._spans.append((began, ended))

    def take(self) -> float:
        """Return the seconds of device time inside spans since the last call, and start again from 0. Waits until the device
        has reached the end of the last span."""
        spans, self._spans = self._spans, []
        if spans:
            spans[-1][1].synchronize()
        return sum(float(began.elapsed_time(ended)) for began, ended in spans) / 1000
