"""Waiting for a counter in shared memory that another process raises."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_SPINS = 30
"""Looks before giving the core away: a peer that is on another core answers within these."""
_YIELD_S = 0.001
"""How long to only yield. With more ranks than cores, yielding is what lets the missing peer run."""
_FIRST_NAP_S = 50e-6
_LONGEST_NAP_S = 0.001
_LOOK_ROUND_S = 0.05
"""How often to look whether the peer still lives."""

LookRound = Callable[[float], str | None]
"""Given how long a wait has lasted, in seconds: why to give it up, None to go on."""


class GaveUpError(Exception):
    """A wait that was given up; the message says why."""


def wait_for(words: memoryview, cell: int, target: int, look_round: LookRound) -> None:
    """Return when ``words[cell] >= target``.

    `look_round` is asked every 50 ms. Raises `GaveUpError` with its reason, unless the counter has come after all.
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
            # Read the counter after the reason: a peer may raise it and leave.
            if reason is not None and words[cell] < target:
                raise GaveUpError(reason)
