"""Waiting for a counter in shared memory that another process increases."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_SPINS = 30
"""Number of reads before yielding the core: a peer on another core answers within these."""
_YIELD_S = 0.001
"""Time during which to yield only, in seconds. With more ranks than cores, yielding lets the missing peer run."""
_FIRST_NAP_S = 50e-6
_LONGEST_NAP_S = 0.001
_LOOK_ROUND_S = 0.05
"""Interval between checks of whether the peer is still alive, in seconds."""

LookRound = Callable[[float], str | None]
"""A function that receives how long a wait has lasted, in seconds, and returns why to give it up, or None to continue."""


class GaveUpError(Exception):
    """A wait that was given up; the message gives the reason."""


def wait_for(words: memoryview, cell: int, target: int, look_round: LookRound) -> None:
    """Wait until ``words[cell] >= target``; `words` is shared memory, and another process increases the counter.

    `look_round` is called about every 50 ms with the seconds waited so far. If it returns a reason, raises `GaveUpError` with
    it, unless the counter has reached the target after all; None continues the wait.
    """
    for _ in range(_SPINS):
        if words[cell] >= target:
            return
    began = time.monotonic()
    while time.monotonic() - began < _YIELD_S:
        os.sched_yield()
        if words[cell] >= target:
            return
    _nap(words, cell, target, look_round, began)


def _nap(words: memoryview, cell: int, target: int, look_round: LookRound, began: float) -> None:
    nap_s, next_look = _FIRST_NAP_S, began + _LOOK_ROUND_S
    while words[cell] < target:
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        now = time.monotonic()
        if now >= next_look:
            next_look = now + _LOOK_ROUND_S
            reason = look_round(now - began)
            # Read the counter after the reason: a peer may increase it and leave.
            if reason is not None and words[cell] < target:
                raise GaveUpError(reason)
