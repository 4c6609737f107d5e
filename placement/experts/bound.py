"""A lower bound of the load of the most loaded rank, for any packing of experts onto ranks (EPLB).

Given are the load of each expert and the slots of each rank (at least `s`). A packing may choose any number of copies of each
expert, as long as all slots are filled and no rank holds an expert twice; copies share a load evenly. If no rank exceeds a load
`T`, then the following conditions hold:

* `T` is at least the mean load of the ranks;
* no copy is heavier than `T` minus the minimum load of its rank's other slots, which gives a minimum number of copies of each
  expert;
* no rank has more than `k` copies heavier than ``(T - minimum load of s-k-1 other slots) / (k+1)``, since k+1 of them and the
  rest would exceed `T`. So there are at most ``k * ranks`` such copies, for each k from 1 to s-1. An expert with more copies
  has lighter ones, but the number of spare slots is limited (the count is relaxed: fractions of experts may become lighter).

Bisection finds the least `T` that satisfies all conditions. The result is a value just below it that violates one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_HALVINGS = 40
_MOST_TOGETHER = 12
"""Largest `k` for which the third condition is checked."""


def least_load(load: NDArray[np.float64], slots: Sequence[int]) -> float:
    """Returns a lower bound of the load of the most loaded rank in one layer, valid for every packing and in the unit of
    `load`. `load` has the load of each expert, ``[experts]``; `slots` the number of expert slots of each rank."""
    low, high = float(load.sum()) / len(slots), float(load.sum())
    if not high or not _speaks_against(low, load, slots):
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _speaks_against(middle, load, slots) else (low, middle)
    return low


def _speaks_against(limit: float, load: NDArray[np.float64], slots: Sequence[int]) -> bool:
    """Whether the conditions prove that no packing can keep every rank within `limit`."""
    ranks, room = len(slots), min(slots)
    spare = sum(slots) - len(load)
    copies = np.ones(len(load))
    beside = _least_beside(load, copies + spare, ranks, room)
    for _ in range(2):  # the second pass knows how many copies the heavy experts need
        heaviest = limit - beside[room - 1]
        if heaviest <= 0:
            return True
        copies = _copies_below(load, heaviest)
        spare = sum(slots) - int(copies.sum())
        if spare < 0 or copies.max() > ranks:
            return True
        beside = _least_beside(load, copies + spare, ranks, room)
    return any(
        _least_heavier((limit - beside[room - together - 1]) / (together + 1), load, copies, spare, ranks) > together * ranks
        for together in range(1, min(room, _MOST_TOGETHER + 1))
    )


def _copies_below(load: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    """Returns the minimum copies of each expert such that no copy is heavier than `most`, with a tolerance for rounding."""
    return np.maximum(1, np.ceil(load / most * (1 - 1e-12)))


def _least_beside(load: NDArray[np.float64], most_copies: NDArray[np.float64], ranks: int, room: int) -> NDArray[np.float64]:
    """Returns the minimum load of 0, 1, 2, ... slots: that of the lightest possible copies of different experts."""
    lightest = np.sort(load / np.minimum(most_copies, ranks))[:room]
    return np.concatenate([[0.0], np.cumsum(lightest)])


def _least_heavier(weight: float, load: NDArray[np.float64], copies: NDArray[np.float64], spare: int, ranks: int) -> float:
    """Returns the minimum number of copies heavier than `weight` if `spare` copies can be added to `copies`."""
    if weight <= 0:
        return 0.0
    needed = _copies_below(load, weight)
    heavier = needed > copies
    gone, cost = copies[heavier], needed[heavier] - copies[heavier]
    possible = needed[heavier] <= ranks
    order = np.argsort(-gone[possible] / cost[possible], kind="stable")
    gone_first, cost_first = gone[possible][order], cost[possible][order]
    before = np.concatenate([[0.0], np.cumsum(cost_first)[:-1]]) if len(order) else np.zeros(0)
    parts = np.clip((spare - before) / cost_first, 0, 1)
    return float(gone.sum() - (parts * gone_first).sum())
