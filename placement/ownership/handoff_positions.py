"""Positions of a sequence as runs that repeat: what one KV owner keeps, and what two owners under unlike layouts both keep.

Two owners and pages of 16 on one side, three and pages of 32 on the other; what the first owner here and the second there
share repeats every ``lcm(2 * 16, 3 * 32) = 96`` positions::

    here, owner 0    0-15       32-47       64-79        of every 32
    there, owner 1              32-------63              of every 96
    both                        32-47                    of every 96

So a long sequence takes no more room than a short one, and a chunk of it is the same runs in another window.
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
    """The positions in `window` that fall into `runs`, which lie in ``range(period)`` and repeat with it."""

    window: range
    period: int
    runs: tuple[range, ...]

    def __len__(self) -> int:
        return self._below(self.window.stop) - self._below(self.window.start)

    def within(self, window: range) -> PeriodicPositions:
        """Those of them that are also in `window`."""
        start = max(self.window.start, window.start)
        return replace(self, window=range(start, max(start, min(self.window.stop, window.stop))))

    def anywhere(self, window: range) -> PeriodicPositions:
        """The same runs in any other window."""
        return replace(self, window=window)

    def spans(self) -> Iterator[range]:
        """They themselves, ascending, as ranges that do not touch each other."""
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
        """How many there are before `position`, were there no window."""
        periods, rest = divmod(position, self.period)
        return periods * sum(map(len, self.runs)) + sum(max(0, min(run.stop, rest) - run.start) for run in self.runs)

    def __str__(self) -> str:
        """``0-15, 32-47 of every 96``, or ``all``."""
        if any(len(run) == self.period for run in self.runs):
            return "all"
        return f"{', '.join(f'{run.start}-{run.stop - 1}' for run in self.runs)} of every {self.period}"


@lru_cache(maxsize=4096)
def shared_runs(one: Ownership, other: Ownership) -> tuple[int, tuple[range, ...]]:
    """Period and runs of the positions that both owners keep."""
    period = lcm(one.owners * one.block_size, other.owners * other.block_size)
    both = np.intersect1d(one.positions(period), other.positions(period), assume_unique=True)
    if not len(both):
        return period, ()
    cuts = np.flatnonzero(np.diff(both) > 1) + 1
    edges = [0, *cuts.tolist(), len(both)]
    return period, tuple(range(int(both[start]), int(both[stop - 1]) + 1) for start, stop in pairwise(edges))


def shared(one: Ownership, other: Ownership, window: range) -> PeriodicPositions:
    """The positions in `window` that both owners keep."""
    return PeriodicPositions(window, *shared_runs(one, other))
