"""Periodic sets of positions: the positions of a sequence that two KV owners under different layouts both keep.

With two owners and pages of 16 tokens on one side, and three owners and pages of 32 on the other, the positions that the first
owner of the source and the second of the destination both keep repeat every ``lcm(2 * 16, 3 * 32) = 96`` positions::

    source, owner 0         0-15       32-47       64-79        of every 32
    destination, owner 1               32-------63              of every 96
    both                               32-47                    of every 96

So a long sequence needs no more memory than a short one, and a chunk of a sequence has the same runs in another window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import lcm

import numpy as np

from placement.ownership.context import Ownership


@dataclass(frozen=True)
class PeriodicPositions:
    """The positions in `window` that lie in `runs`: ranges within ``range(period)`` that repeat every `period` positions."""

    window: range
    period: int
    runs: tuple[range, ...]

    def __len__(self) -> int:
        return self._below(self.window.stop) - self._below(self.window.start)

    def within(self, window: range) -> PeriodicPositions:
        """Returns the positions of this set that are also in `window`, a range of positions in the sequence."""
        start = max(self.window.start, window.start)
        return replace(self, window=range(start, max(start, min(self.window.stop, window.stop))))

    def anywhere(self, window: range) -> PeriodicPositions:
        """Returns the same periodic runs in another `window`, a range of positions in the sequence, whatever the present one
        is."""
        return replace(self, window=window)

    def spans(self) -> Iterator[range]:
        """Yields the positions of the set in ascending order, as maximal contiguous ranges."""
        if any(len(run) == self.period for run in self.runs):
            yield from [self.window] if self.window else []
            return
        last = range(0)
        for span in self._clipped():
            if last and last.stop == span.start:
                last = range(last.start, span.stop)
                continue
            yield from [last] if last else []
            last = span
        yield from [last] if last else []

    def _clipped(self) -> Iterator[range]:
        first = self.window.start // self.period * self.period
        for shift in range(first, self.window.stop, self.period):
            for run in self.runs:
                span = range(max(run.start + shift, self.window.start), min(run.stop + shift, self.window.stop))
                if span:
                    yield span

    def _below(self, position: int) -> int:
        """Returns the number of positions of the runs before `position`, regardless of the window."""
        periods, rest = divmod(position, self.period)
        return periods * sum(map(len, self.runs)) + sum(max(0, min(run.stop, rest) - run.start) for run in self.runs)

    def __str__(self) -> str:
        """Returns the runs as text: ``0-15, 32-47 of every 96``, or ``all``."""
        if any(len(run) == self.period for run in self.runs):
            return "all"
        return f"{', '.join(f'{run.start}-{run.stop - 1}' for run in self.runs)} of every {self.period}"


@lru_cache(maxsize=4096)
def shared_runs(one: Ownership, other: Ownership) -> tuple[int, tuple[range, ...]]:
    """Returns the period, in positions, and the ranges within one period of the positions that both owners keep; no ranges if
    they share none."""
    period = lcm(one.owners * one.block_size, other.owners * other.block_size)
    both = np.intersect1d(one.positions(period), other.positions(period), assume_unique=True)
    if not len(both):
        return period, ()
    cuts = np.flatnonzero(np.diff(both) > 1) + 1
    edges = [0, *cuts.tolist(), len(both)]
    return period, tuple(range(int(both[start]), int(both[stop - 1]) + 1) for start, stop in pairwise(edges))


def shared(one: Ownership, other: Ownership, window: range) -> PeriodicPositions:
    """Returns the positions in `window`, a range of positions in the sequence, that both owners keep."""
    return PeriodicPositions(window, *shared_runs(one, other))
