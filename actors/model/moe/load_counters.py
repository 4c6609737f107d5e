"""What the experts of a layer did on this rank since they were last asked: tokens of each, and seconds.

    fast rank   [   experts    ][ combine: waits for the slow one | results ]
    slow rank   [   experts                                       ][ results ]

A token is counted where an expert ran it; steps have no padding that could be. On CUDA seconds are those between events on the
stream, read when they are asked for, so that no step waits for them.
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
    """What one layer's experts did: tokens run here by expert of the layer, seconds of their maths and of the combine."""

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
        """The slots of this rank, which hold the experts `held` [slots], ran so many `tokens` [slots]."""
        self._tokens.index_add_(0, held, tokens)

    def take(self) -> LayerLoad:
        """Everything since the last time."""
        load = LayerLoad(self._tokens.tolist(), self.experts.take(), self.combine.take())
        self._tokens.zero_()
        return load


class HostTime:
    """Seconds spent inside spans, by the host's clock."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def span(self) -> Iterator[None]:
        """Counts what is done inside."""
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """The seconds since the last time."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class CudaTime:
    """Seconds spent inside spans, by the device's clock."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """Counts what is queued inside."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        yield
        ended.record()
        self._spans.append((began, ended))

    def take(self) -> float:
        """The seconds since the last time. Waits for the device to come to the last span's end."""
        spans, self._spans = self._spans, []
        if spans:
            spans[-1][1].synchronize()
        return sum(float(began.elapsed_time(ended)) for began, ended in spans) / 1000
